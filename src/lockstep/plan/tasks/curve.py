"""How a training's step changes with the number of ranks: a row for each number, every one of them a simulation."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lockstep.collectives.network import Network
from lockstep.errors import UsageError
from lockstep.mesh.layout import Mesh
from lockstep.method import Method
from lockstep.plan.links.carriers import OneHost
from lockstep.plan.links.connection import Connection
from lockstep.plan.links.here import ThisHost
from lockstep.plan.simulation.failures import Failures, Goodput, goodput
from lockstep.plan.simulation.simulate import Assumed, Predicted, simulate
from lockstep.plan.tasks.of_task import Scaling, heard, samples_of, slots_of, work_of
from lockstep.plan.tasks.profile import Profile


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """So many ranks."""

    workers: int
    predicted: Predicted
    samples: float
    """Of all ranks in a step."""
    efficiency: float
    """Speedup over the ranks that it is compared with, over the ratio of their numbers."""
    goodput: Goodput | None

    @property
    def samples_per_s(self) -> float:
        """While nothing fails."""
        return self.samples / self.predicted.step

    def as_json(self) -> dict[str, Any]:
        step = self.predicted
        found: dict[str, Any] = {
            "workers": self.workers,
            "step_ms": 1e3 * step.step,
            "efficiency": self.efficiency,
            "limiting": step.limiting,
            "samples_per_s": self.samples_per_s,
            "low_ms": 1e3 * step.low,
            "high_ms": 1e3 * step.high,
            "bytes_sent": step.sent,
            "communication_ms": 1e3 * step.communication,
            "parts_ms": {name: 1e3 * seconds for name, seconds in step.parts.items()},
        }
        if self.goodput is not None:
            found |= {"goodput": self.goodput.share, "checkpoint_interval_s": self.goodput.interval}
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """Of one task on one network."""

    task: str
    scaling: Scaling
    slots: int
    """Micro-batches of the task's own global batch."""
    rows: Sequence[Row]
    """By growing number of ranks."""

    @property
    def idle_from(self) -> int | None:
        """The first number of ranks of which some have no micro-batch; None where all have."""
        if self.scaling.weak:
            return None
        return next((row.workers for row in self.rows if row.workers > self.slots), None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """What is asked about a profile. Raises UsageError for a mesh that cannot be planned, before anything is measured."""

    workers: Sequence[int]
    scaling: Scaling
    method: Method
    failures: Failures | None = None
    storage: float | None = None
    """Samples a second for all ranks together."""

    def __post_init__(self) -> None:
        if self.method.mesh is not None:
            _check_mesh(self.method.mesh, {*self.workers, self.scaling.base})


def _check_mesh(mesh: Mesh, counts: Iterable[int]) -> None:
    """Of a task nobody knows the layers, and all ranks but a single one stand somewhere in the mesh."""
    if mesh.pipeline * mesh.tensor > 1:
        raise UsageError(
            f"--mesh {mesh} with the plan of a task: no profile says what goes from layer to layer; give data and shard only, or --model and "
            "--device in place of the task"
        )
    if wrong := sorted(count for count in counts if count > 1 and count % mesh.shard):
        raise UsageError(
            f"--mesh {mesh} with --workers {','.join(map(str, wrong))}: shard takes {mesh.shard} ranks; give multiples of {mesh.shard}, such as "
            f"--workers {mesh.shard},{2 * mesh.shard}, or 1"
        )


def curve(profile: Profile, asked: Question, joined: Connection | ThisHost) -> Curve:
    """Raises UsageError for what the profile or this host does not say."""
    base = predicted(profile, asked, joined, asked.scaling.base, asked.method)
    base_rate = samples_of(profile, asked.scaling, asked.scaling.base) / base.step / asked.scaling.base
    rows = []
    for workers in sorted(set(asked.workers)):
        found = predicted(profile, asked, joined, workers, asked.method)
        samples = samples_of(profile, asked.scaling, workers)
        rows.append(
            Row(
                workers=workers,
                predicted=found,
                samples=samples,
                efficiency=samples / found.step / workers / base_rate,
                goodput=None if asked.failures is None else goodput(asked.failures, workers),
            )
        )
    return Curve(task=profile.task, scaling=asked.scaling, slots=slots_of(profile), rows=rows)


def predicted(profile: Profile, asked: Question, joined: Connection | ThisHost, workers: int, method: Method) -> Predicted:
    """One step by `method`, which need not be the one that was asked for. A mesh's data axis is as long as the ranks allow; one rank is no mesh."""
    if method.mesh is not None:
        shard = method.mesh.shard if workers > 1 else 1
        method = replace(method, mesh=Mesh(data=workers // shard, shard=shard))
    work = work_of(profile, asked.scaling, workers)
    software = profile.message(heard(asked.scaling, workers)) if _takes_software(joined, workers) else 0.0
    assumed = Assumed(native=joined.native, link_error=joined.error, software=software, storage=asked.storage)
    found = simulate(work, workers, joined.network, method, assumed)
    if _may_be_hierarchical(profile, joined.network, method, workers):
        hierarchical = replace(method, reduce="hierarchical")
        return min(found, simulate(work, workers, joined.network, hierarchical, assumed), key=lambda each: each.step)
    return found


def _takes_software(joined: Connection | ThisHost, workers: int) -> bool:
    """Whether messages have a part that no network takes from them. Of a free network that is taken away too."""
    return (
        workers > 1
        and isinstance(joined, Connection)
        and not (joined.network.between.latency == 0 and math.isinf(joined.network.between.bandwidth))
    )


def _may_be_hierarchical(profile: Profile, network: Network | OneHost, method: Method, workers: int) -> bool:
    """Whether reduce="auto" would try it, as gradients/reductions.py does: several ranks on each of several hosts, on CPUs."""
    whole = (
        method.reduce == "auto" and method.compression is None and method.server is None and (method.mesh is None or method.mesh.only_data)
    )
    return whole and profile.device == "cpu" and isinstance(network, Network) and 1 < network.ranks_per_node < workers
