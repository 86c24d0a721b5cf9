"""What a run asks of Ray. Only this file imports Ray, and only once a cluster is asked for."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from lockstep.errors import LockstepError, UsageError
from lockstep.launcher.fixed import host_and_port
from lockstep.runtime import extras

RAY = "--ray"
_REACH_SECONDS = 5.0
_HEAD_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class ClusterNode:
    """A node of the cluster, with room for `slots` ranks of this job."""

    id: str
    label: str
    address: str
    slots: int
    leaves: bool = False
    """Ray is draining it: its machine is about to be taken away."""


@contextmanager
def connected(address: str, folder: Path | None = None) -> Iterator[None]:
    """Connect to the cluster at `address` as a driver, until the block's end. "auto": RAY_ADDRESS,
    else this host's cluster.

    `folder`: Ray brings it to every node, where it is the actors' working directory.

    Raises UsageError if Ray is not installed, or if there is no cluster.
    """
    if find_spec("ray") is None:
        raise extras.missing(RAY, "Ray", "ray")
    address = os.environ.get("RAY_ADDRESS", address) if address == "auto" else address
    if address != "auto" and "://" not in address:
        _check_reachable(address)
    import ray

    location = "on this host" if address == "auto" else f"at {address}"
    brought = None if folder is None else {"working_dir": str(folder)}
    # Ray would print twenty lines of a dead raylet's log to stdout. The driver itself reports what
    # a run needs to know of nodes.
    with open(os.devnull, "w") as nothing, redirect_stdout(nothing):
        try:
            ray.init(
                address=address,
                log_to_driver=False,
                logging_level=logging.ERROR,
                runtime_env=brought,
            )
        except ray.exceptions.AuthenticationError as error:
            raise UsageError("ray-wants-token", where=location, why=_last_line(error)) from None
        except (ConnectionError, ValueError, RuntimeError) as error:
            first_line = str(error).strip().partition("\n")[0]
            raise UsageError("no-ray-cluster", where=location, why=first_line) from None
        try:
            yield
        finally:
            ray.shutdown()


class Head:
    """The cluster's head node. If it has gone, Ray itself ends this process after a minute, with a
    message of its own.
    """

    def __init__(self) -> None:
        import ray

        self.address: str = ray.get_runtime_context().gcs_address
        self._heard = time.monotonic()

    def check(self) -> None:
        """Raise LockstepError if the head node has not been reached for half a minute."""
        try:
            socket.create_connection(host_and_port(self.address, RAY), timeout=1.0).close()
            self._heard = time.monotonic()
        except OSError:
            if time.monotonic() - self._heard > _HEAD_SECONDS:
                raise LockstepError("ray-head-gone", address=self.address) from None


def _check_reachable(address: str) -> None:
    """Raise UsageError if nobody listens at `address`. Ray itself tries for minutes."""
    host, port = host_and_port(address, RAY)
    try:
        with socket.create_connection((host, port), timeout=_REACH_SECONDS) as connection:
            if ip_address(connection.getpeername()[0]).is_loopback:
                # otherwise Ray replaces it by another address of this host
                os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    except OSError as error:
        reason = error.strerror or str(error)
        raise UsageError("ray-not-reachable", address=address, why=reason) from None


def nodes(*, gpus: bool) -> list[ClusterNode]:
    """Return the living nodes with room for at least one rank: a GPU each, or a CPU."""
    import ray

    # Ray has no public function for this; Ray Train uses this one
    from ray._private.state import state

    draining = state.get_draining_nodes()
    result = []
    for node in ray.nodes():  # type: ignore[no-untyped-call]
        slots = int(node["Resources"].get("GPU" if gpus else "CPU", 0))
        if node["Alive"] and slots:
            node_id = node["NodeID"]
            address = node["NodeManagerAddress"]
            label = f"{node['NodeManagerHostname']} ({address}, {node_id[:6]})"
            result.append(ClusterNode(node_id, label, address, slots, node_id in draining))
    return result


def has_gpus() -> bool:
    import ray

    return bool(ray.cluster_resources().get("GPU", 0))  # type: ignore[no-untyped-call]


def actor(kind: type, args: Sequence[object], node: ClusterNode, count: int, *, gpus: bool) -> Any:
    """Start `kind(*args)` as an actor on this node, with the resources of `count` ranks."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return (
        # Ray's stubs lack concurrency_groups
        ray.remote(concurrency_groups={"words": 1})(kind)  # type: ignore[call-overload]
        .options(
            num_gpus=count if gpus else 0,
            num_cpus=0 if gpus else count,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False),
        )
        .remote(*args)
    )


def kill(actor: Any) -> None:
    import ray

    with suppress(Exception):  # it has gone already
        ray.kill(actor)


def wait(references: Sequence[Any], seconds: float, *, all_of_them: bool = False) -> list[Any]:
    """Return the references that are ready. Waits at most `seconds`, for the first one or for all
    of them.
    """
    import ray

    if not references:
        time.sleep(0 if all_of_them else seconds)
        return []
    count = len(references) if all_of_them else 1
    ready, _ = ray.wait(list(references), num_returns=count, timeout=seconds)
    return list(ready)


class Unable(str):
    """Why an actor gives no answer: its own code has failed, and would fail again."""


def answer(reference: Any) -> Any:
    """Return what an actor's method returned, or in words why it did not: the actor has gone, with
    its process or its node, or is `Unable`.
    """
    import ray

    try:
        return ray.get(reference)
    except ray.exceptions.RayActorError as error:
        return Unable(_last_line(error)) if error.actor_init_failed else "has gone"
    except ray.exceptions.RayError as error:
        return Unable(_last_line(error))


def _last_line(error: Exception) -> str:
    return str(error).strip().splitlines()[-1].strip()


def request(count: int, *, gpus: bool) -> None:
    """Ask the cluster's autoscaler for room for `count` ranks. This replaces the last request; 0
    withdraws it.
    """
    from ray.autoscaler.sdk import request_resources

    request_resources(bundles=[{"GPU" if gpus else "CPU": 1}] * count)
