"""The ways to lay a profiled task out over its ranks: what each takes of a rank's memory,
whether that is there, and how long a step takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lockstep.config.mesh import Mesh
from lockstep.config.parallelism import Parallelism
from lockstep.tools.plan.carriers import OneHost
from lockstep.tools.plan.connection import PlanNetwork
from lockstep.tools.plan.curve import Question, predicted
from lockstep.tools.plan.models.fits import RankMemory
from lockstep.tools.timing.machine import memory_of_a_rank
from lockstep.tools.timing.profile import Profile
from lockstep.tools.timing.tables import table


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskLayout(RankMemory):
    """One of them, and what a rank of it holds; activations are whatever else a step needs for a
    while, too.
    """

    name: str
    fits: bool
    """Into the memory of a rank on a host like this."""
    step_ms: float


def layouts_of(profile: Profile, asked: Question, joined: PlanNetwork) -> list[TaskLayout]:
    """For the largest number of ranks: those that fit, the quickest first, then the others.
    Empty for one rank, for a way that was chosen, on this host, where only replicas are
    measured, and where nobody knows what a step needs.
    """
    workers = max(asked.workers)
    if (
        workers == 1
        or profile.peak is None
        or isinstance(joined.network, OneHost)
        or asked.method != Parallelism()
    ):
        return []
    room = memory_of_a_rank(asked.scaling.on_host(workers))
    found = []
    for name, method, parts, last in (
        ("replicated", Parallelism(), 1, 1),
        ("update sharded", Parallelism(update="sharded"), 1, workers),
        (f"mesh shard={workers}", Parallelism(mesh=Mesh(shard=workers)), workers, workers),
    ):
        step = predicted(profile, asked, joined, workers, method).step
        found.append(_layout(name, profile, parts, last, room, 1e3 * step))
    return sorted(found, key=lambda each: (not each.fits, each.step_ms))


def _layout(
    name: str, profile: Profile, parts: int, last: int, room: float | None, step_ms: float
) -> TaskLayout:
    """`parts`: in how many a parameter and its gradient are cut; `last`: the optimizer's state.
    Two buckets at a time are whole.
    """
    gradients = sum(bucket.elements for bucket in profile.buckets) * profile.width
    whole = (
        0 if parts == 1 else 2 * max(bucket.elements for bucket in profile.buckets) * profile.width
    )
    assert profile.peak is not None
    made = TaskLayout(
        name=name,
        weights=min(profile.weights, profile.weights / parts + whole),
        gradients=min(gradients, gradients / parts + whole),
        optimizer=profile.states / last,
        activations=max(0.0, profile.peak - profile.weights - gradients - profile.states),
        fits=True,
        step_ms=step_ms,
    )
    return replace(made, fits=room is None or made.total <= room)


def describe(found: Sequence[TaskLayout], workers: int) -> str:
    """A line each; nothing where there are none."""
    if not found:
        return ""
    head = [
        f"a rank of {workers} holds, in MB",
        "weights",
        "gradients",
        "optimizer",
        "activations",
        "step",
        "",
    ]
    return f"\n{table(head, map(_cells, found), left=[0, 6])}\n"


def _cells(each: TaskLayout) -> list[str]:
    sizes = [
        f"{size / 1e6:.2f}"
        for size in (each.weights, each.gradients, each.optimizer, each.activations)
    ]
    return [
        each.name,
        *sizes,
        f"{each.step_ms:.1f} ms",
        "" if each.fits else "does not fit into the memory of a host like this",
    ]
