"""One generation of ranks on this host, alone or among others, run by torch's elastic agent.

What is ours: a rendezvous whose store other users cannot reach, ranks' processes that are looked at without being reaped (so that
a whole process group can be ended safely), a short moment for the true cause to show before the others are stopped, and silence.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed import HashStore, Store, TCPStore
from torch.distributed.elastic.agent.server.api import RunResult, Worker, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.events.api import Event, EventSource
from torch.distributed.elastic.multiprocessing.api import LogsDest, LogsSpecs, SubprocessContext
from torch.distributed.elastic.rendezvous.api import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from lockstep.errors import ExitCode
from lockstep.launcher import processes
from lockstep.launcher.agent_environment import SIGNALS
from lockstep.launcher.host_store import HostStore
from lockstep.launcher.hosts.interfaces import family_of
from lockstep.launcher.hosts.messages import Roll, Share

_LOOK_SECONDS = 0.05
_SETTLE_SECONDS = 1.0  # how long a rank's complaint about a peer waits for that peer's own record
_DYING_SECONDS = 20.0  # how much longer it waits for a peer that is seen to be dying, or is leaving as it was asked to
_GRACE_SECONDS = 0.5  # between SIGTERM and SIGKILL
_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Ended:
    """How this host's ranks stood when the generation was over: before anyone was stopped by us."""

    pids: Mapping[int, int]
    codes: Mapping[int, int | None]
    """By rank: exit code, minus the signal that killed it, or None if it was still running."""


class Stopped(Exception):
    """The caller asked to stop. Nothing is left running."""


def run_generation(
    command: Sequence[str],
    workers: int,
    *,
    environment: Mapping[str, str],
    explained: Callable[[Ended], bool],
    stopping: Callable[[Mapping[int, int]], bool],
    spared: Callable[[Ended], Collection[int]] = lambda now: (),
    share: Share | None = None,
) -> Ended:
    """Run `command` (arguments for this Python) on `workers` ranks of this host until all end well or the first does not.

    When a rank fails, `explained` is asked whether what is known tells the cause; if not, it is asked again for a second. Then the
    others are stopped: SIGTERM, half a second, SIGKILL to each rank's process group. `stopping(pids by rank)` is asked 20 times a second, of those that live.
    `spared` says which of the ranks that have failed are done without: the others go on.
    With `share` these are some of the ranks of several hosts; they are stopped too when it is called off.

    Raises:
        Stopped: `stopping` was true.
    """
    rendezvous = _Alone() if share is None else _Among(share.roll)
    # torchelastic substitutes ${local_rank} and the like in arguments; $$ is its spelling of a plain $.
    spec = WorkerSpec(
        role="lockstep",
        local_world_size=workers,
        rdzv_handler=rendezvous,
        entrypoint=sys.executable,
        args=tuple(argument.replace("$", "$$") for argument in command),
        max_restarts=0,
        monitor_interval=_LOOK_SECONDS,
    )
    with _silence():
        agent = _Agent(spec, _Streams(environment), explained, stopping, share, spared)
        try:
            agent.run()
        finally:
            rendezvous.shutdown()
    return agent.ended()


def gpus() -> int:
    """GPUs of this host that torch can use."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def serve_store(address: str) -> tuple[TCPStore, int]:
    """The store of ranks on several hosts, and its port. The socket is bound here because torch's listens everywhere."""
    listener = socket.create_server((address, 0), family=family_of(address))
    port: int = listener.getsockname()[1]
    return TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()), port


class _Known(RendezvousHandler):
    """Nothing to find out: who takes part is known when the agent is made."""

    @property
    def use_agent_store(self) -> bool:
        return True

    def get_backend(self) -> str:
        return "lockstep"

    def get_run_id(self) -> str:
        return "lockstep"

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        return None

    def num_nodes_waiting(self) -> int:
        return 0

    def shutdown(self) -> bool:
        return True


class _Alone(_Known):
    """This host alone. Its store is the one the ranks meet through."""

    def __init__(self) -> None:
        self._host = HostStore()

    def next_rendezvous(self) -> RendezvousInfo:
        where = RendezvousStoreInfo(_LOOPBACK, self._host.port)
        return RendezvousInfo(self._host.store, rank=0, world_size=1, bootstrap_store_info=where)

    def shutdown(self) -> bool:
        self._host.close()
        return True


class _Among(_Known):
    """This host among others, as the meeting has told. The agent itself needs no store: the ranks' own is the meeting's."""

    def __init__(self, roll: Roll) -> None:
        self._roll = roll

    def next_rendezvous(self) -> RendezvousInfo:
        where = RendezvousStoreInfo(self._roll.address, self._roll.port)
        return RendezvousInfo(HashStore(), rank=self._roll.index, world_size=len(self._roll.hosts), bootstrap_store_info=where)


class _Streams(LogsSpecs):
    """Ranks write where this process writes, and see to their own log files. This is also where variables for ranks can be added."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        super().__init__()
        self._environment = environment

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        for env in envs.values():
            env.update(self._environment)
        here = dict.fromkeys(envs, "")
        return LogsDest(stdouts=here, stderrs=dict(here), error_files=dict.fromkeys(envs, os.devnull))

    @property
    def root_log_dir(self) -> str:
        return os.devnull


class _Agent(LocalElasticAgent):
    _pcontext: SubprocessContext | None

    def __init__(
        self,
        spec: WorkerSpec,
        streams: _Streams,
        explained: Callable[[Ended], bool],
        stopping: Callable[[Mapping[int, int]], bool],
        share: Share | None,
        spared: Callable[[Ended], Collection[int]] = lambda now: (),
    ) -> None:
        super().__init__(spec, streams, exit_barrier_timeout=1)
        self._share = share
        self._first_rank = 0 if share is None else share.roll.first_rank
        self._explained = explained
        self._stopping = stopping
        self._spared = spared
        self._settled_at: float | None = None
        self._over: Ended | None = None

    def ended(self) -> Ended:
        assert self._over is not None
        return self._over

    def _assign_worker_ranks(self, store: Store, group_rank: int, group_world_size: int, spec: WorkerSpec) -> list[Worker]:
        """Torch's agents would exchange their numbers through the store; here they are known."""
        size = spec.local_world_size if self._share is None else self._share.roll.size
        numbers = [(local, self._first_rank + local) for local in range(spec.local_world_size)]
        return [Worker(local, rank, role_rank=rank, world_size=size, role_world_size=size) for local, rank in numbers]

    def _exit_barrier(self) -> None:
        """Nobody waits here for the agents of other hosts: the meeting tells when all have ended."""

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        with _variable(SIGNALS, "none"):
            pids: dict[int, Any] = super()._start_workers(worker_group)
        return pids

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        now = self._look()
        living = {rank: pid for rank, pid in now.pids.items() if now.codes[rank] is None}
        if living and self._stopping(living):
            raise Stopped
        called_off = self._share is not None and self._share.called_off()
        failing = {rank for rank, code in now.codes.items() if code}
        failed = bool(failing and failing.difference(self._spared(now)))
        if not failed and not called_off and None in now.codes.values():
            return RunResult(state=WorkerState.HEALTHY)
        if failed and not called_off and not self._settled(now):
            return RunResult(state=WorkerState.HEALTHY)
        self._over = self._over or now  # asked again, it would show those that were ended here
        if failed or called_off:
            self._end_ranks()
        else:
            self._end_left_over()
        result: RunResult = super()._monitor_workers(worker_group)
        return result

    def _settled(self, now: Ended) -> bool:
        if self._settled_at is None:
            self._settled_at = time.monotonic() + _SETTLE_SECONDS
        if self._explained(now):
            return True
        late = time.monotonic() - self._settled_at
        # One that was killed is gone for its peers as soon as its first thread is, and for the system when its last, perhaps a nice one, is.
        dying = any(code is None and processes.state(now.pids[rank]) == "Z" for rank, code in now.codes.items())
        leaving = ExitCode.PREEMPTED in now.codes.values()  # after a save, the others a moment later
        return late > (_DYING_SECONDS if dying or leaving else 0)

    def _look(self) -> Ended:
        ranks = self._ranks()
        return Ended(
            pids={rank: process.pid for rank, process in ranks.items()}, codes={rank: _peek(process) for rank, process in ranks.items()}
        )

    def _ranks(self) -> dict[int, subprocess.Popen[bytes]]:
        handlers = self._pcontext.subprocess_handlers if self._pcontext else {}
        return {self._first_rank + local: handler.proc for local, handler in handlers.items()}

    def _end_ranks(self) -> None:
        """End every rank's process group. A rank that has died is not reaped yet, so its number still means its group."""
        groups = [process for process in self._ranks().values() if process.returncode is None]
        for process in groups:
            _signal_group(process, signal.SIGTERM)
        deadline = time.monotonic() + _GRACE_SECONDS
        while time.monotonic() < deadline and any(_peek(process) is None for process in groups):
            time.sleep(0.01)
        for process in groups:
            _signal_group(process, signal.SIGKILL)

    def _end_left_over(self) -> None:
        """All ranks have ended well. What they have started in their process groups ends with them; not what has a session of its own."""
        deadline = time.monotonic() + _SETTLE_SECONDS
        while left := {rank: found for rank, process in self._ranks().items() if (found := processes.group(process.pid))}:
            if time.monotonic() > deadline:  # helpers of multiprocessing go by themselves
                for rank, found in left.items():
                    _say_left(rank, found)
                self._end_ranks()
                return
            time.sleep(0.01)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGKILL, timeout: int = 30) -> None:
        if self._over is None:  # stopped from outside; otherwise all have ended
            self._end_ranks()
        super()._shutdown(signal.SIGKILL, timeout)

    def _construct_event(self, state: str, source: EventSource, *details: object, **more: object) -> Event:
        """Events go nowhere, but torch would look up this host's full name for each, which can take seconds."""
        return Event(state, source)


def _peek(process: subprocess.Popen[bytes]) -> int | None:
    """The exit code if the process has ended, without reaping it where the system can do that."""
    if process.returncode is not None:
        return process.returncode
    if not hasattr(os, "waitid"):
        return process.poll()
    found = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if found is None:
        return None
    return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status


def _say_left(rank: int, found: Mapping[int, str]) -> None:
    listed = ", ".join(f"{name} (pid {pid})" for pid, name in found.items())
    print(
        f"rank {rank} has left {listed} running: ended with it. A process that shall outlive the run needs a session of its own (start_new_session=True)",
        file=sys.stderr,
        flush=True,
    )


def _signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


@contextmanager
def _variable(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


@contextmanager
def _silence() -> Iterator[None]:
    """torchelastic logs every failure of a rank; the launcher says it once, in its own words."""
    logger = logging.getLogger("torch.distributed.elastic")
    before, handler = logger.propagate, logging.NullHandler()
    logger.propagate = False
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.propagate = before
        logger.removeHandler(handler)
