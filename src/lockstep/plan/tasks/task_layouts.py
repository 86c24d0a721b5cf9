"""The ways to lay a profiled task out over its ranks: what each takes of a rank's memory, whether that is there, and how long a step takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lockstep.mesh.layout import Mesh
from lockstep.method import Method
from lockstep.plan.links.connection import Connection
from lockstep.plan.links.here import ThisHost
from lockstep.plan.tasks.curve import Question, predicted
from lockstep.plan.tasks.profile import Profile
from lockstep.tuning.here import memory_of_a_rank


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """One of them."""

    name: str
    weights: float
    """Bytes of a rank, as those that follow."""
    gradients: float
    optimizer: float
    activations: float
    """And whatever else a step needs for a while."""
    fits: bool
    """Into the memory of a rank on a host like this."""
    step_ms: float

    @property
    def bytes(self) -> float:
        return self.weights + self.gradients + self.optimizer + self.activations


def layouts_of(profile: Profile, asked: Question, joined: Connection | ThisHost) -> list[Layout]:
    """For the largest number of ranks: those that fit, the quickest first, then the others. Empty for one rank, for a way that was
    chosen, on this host, where only replicas are measured, and where nobody knows what a step needs."""
    workers = max(asked.workers)
    if workers == 1 or profile.peak is None or isinstance(joined, ThisHost) or asked.method != Method():
        return []
    room = memory_of_a_rank(asked.scaling.on_host(workers))
    found = []
    for name, method, parts, last in (
        ("replicated", Method(), 1, 1),
        ("update sharded", Method(update="sharded"), 1, workers),
        (f"mesh shard={workers}", Method(mesh=Mesh(shard=workers)), workers, workers),
    ):
        step = predicted(profile, asked, joined, workers, method).step
        found.append(_layout(name, profile, parts, last, room, 1e3 * step))
    return sorted(found, key=lambda each: (not each.fits, each.step_ms))


def _layout(name: str, profile: Profile, parts: int, last: int, room: float | None, step_ms: float) -> Layout:
    """`parts`: in how many a parameter and its gradient are cut; `last`: the optimizer's state. Two buckets at a time are whole."""
    gradients = sum(bucket.elements for bucket in profile.buckets) * profile.width
    whole = 0 if parts == 1 else 2 * max(bucket.elements for bucket in profile.buckets) * profile.width
    assert profile.peak is not None
    made = Layout(
        name=name,
        weights=min(profile.weights, profile.weights / parts + whole),
        gradients=min(gradients, gradients / parts + whole),
        optimizer=profile.states / last,
        activations=max(0.0, profile.peak - profile.weights - gradients - profile.states),
        fits=True,
        step_ms=step_ms,
    )
    return replace(made, fits=room is None or made.bytes <= room)


def describe(found: Sequence[Layout], workers: int) -> str:
    """A line each; nothing where there are none."""
    if not found:
        return ""
    lines = [f"\n{f'a rank of {workers} holds, in MB':<32}{'weights':>10}{'gradients':>11}{'optimizer':>11}{'activations':>13}{'step':>12}"]
    for each in found:
        sizes = f"{each.weights / 1e6:>10.2f}{each.gradients / 1e6:>11.2f}{each.optimizer / 1e6:>11.2f}{each.activations / 1e6:>13.2f}"
        lines.append(
            f"{each.name:<32}{sizes}{each.step_ms:>9.1f} ms" + ("" if each.fits else "  does not fit into the memory of a host like this")
        )
    return "\n".join(lines) + "\n"
