"""The work of a rank in a step, as the simulation needs it. It comes from the profile of a task,
for any number of ranks, or from three numbers (given_step.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lockstep.config import knob
from lockstep.config.task import Task
from lockstep.data.windows import Plan
from lockstep.gradients.facts import numbers
from lockstep.tools.timing.profile import Leaves, Profile

WIDTH = 4  # bytes of an element: float32
# share of a micro-batch's time: a backward has two products (for the gradients of the inputs and of
# the weights), a forward has one
BACKWARD = 2 / 3


@dataclass(frozen=True, kw_only=True, slots=True)
class RankWork:
    """Work of the rank that has the most micro-batches. Seconds are means. Raises UsageError for
    values out of range.
    """

    forward: float
    """Seconds of one micro-batch's forward."""
    backward: float
    """Seconds of one micro-batch's backward."""
    micro_batches: int
    optimizer: float = 0.0
    other: float = 0.0
    """Seconds per step that do not depend on the number of micro-batches: Python, records,
    checks.
    """
    spread: float = 0.0
    """Standard deviation of a rank's computation in a step, divided by its mean; independent from
    rank to rank.
    """
    in_turns: float = 1.0
    """Number of ranks that take turns on one core. A rank that is done leaves the core to the
    others, so only the sum of their times can be late.
    """
    buckets: Sequence[Leaves] = ()
    """Buckets in the order in which they leave."""
    width: float = WIDTH
    """Bytes per element of a gradient."""
    facts: int = 0
    """Bytes that ranks exchange before the last backward of a step: weights, losses."""
    buffers: int = 0
    """Bytes that are averaged after the gradients in every step: BatchNorm's statistics."""
    loading: float = 0.0
    """Seconds to load a rank's samples of a step, in its own process."""

    def __post_init__(self) -> None:
        for name in ("forward", "backward", "optimizer", "other", "spread", "loading"):
            knob.number(name, getattr(self, name), least=0)
        knob.whole("micro_batches", self.micro_batches)
        for bucket in self.buckets:
            knob.number("ready", bucket.ready, least=0, most=1)

    @property
    def computation(self) -> float:
        """Seconds of forwards and backwards in a step."""
        return self.micro_batches * (self.forward + self.backward)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanScaling:
    """How the work of a step depends on the number of ranks."""

    base: int
    """A small number of ranks, which efficiency is relative to."""
    weak: bool = False
    """Whether the global batch grows with the number of ranks: each rank then has as many
    micro-batches as with `base` ranks.
    """
    per_host: int = 1
    """Number of ranks that share the cores of one host."""

    def on_host(self, workers: int) -> int:
        """Return the number of ranks on one host."""
        return min(workers, self.per_host)


def slots_of(sizes: Profile | Task) -> int:
    """Return the number of micro-batches of the task's own global batch."""
    return Plan(
        samples=sizes.global_batch, global_batch=sizes.global_batch, micro_batch=sizes.micro_batch
    ).slots


def sides(
    scaling: PlanScaling, counts: Iterable[int], slots: int, cores: int, device: str
) -> list[int]:
    """Return the numbers of ranks to profile side by side: as many as share a host, but at most one
    per core. GPU ranks share nothing, so one is enough.
    """
    if device == "cuda":
        return [1]
    computing = {_computing(scaling, count, slots) for count in (*counts, scaling.base)}
    return sorted({min(ranks, cores) for ranks in computing})


def talking(scaling: PlanScaling, counts: Iterable[int], device: str) -> list[int]:
    """Return the numbers of ranks of one host whose messages must be timed: those that share its
    cores, but at least two.
    """
    if device == "cuda":
        return []
    return sorted(
        {representative_ranks(scaling, count) for count in (*counts, scaling.base) if count > 1}
    )


def representative_ranks(scaling: PlanScaling, workers: int) -> int:
    """Return the number of ranks of one host whose messages represent those of `workers` ranks."""
    return max(2, scaling.on_host(workers))


def _computing(scaling: PlanScaling, workers: int, slots: int) -> int:
    """Return the number of ranks of one host that have a micro-batch."""
    on_host = scaling.on_host(workers)
    return on_host if scaling.weak else min(on_host, slots)


def samples_of(profile: Profile, scaling: PlanScaling, workers: int) -> float:
    """Return the samples of all ranks in a step."""
    if not scaling.weak:
        return profile.global_batch
    return profile.global_batch * workers / scaling.base


def work_of(profile: Profile, scaling: PlanScaling, workers: int) -> RankWork:
    """Return the work of the rank with the most micro-batches, among `workers` ranks.

    If a host has more ranks than cores, they take turns: all times grow in proportion.
    """
    slots = slots_of(profile)
    side_by_side = 1
    turns = 1.0
    if profile.device != "cuda":
        on_host = _computing(scaling, workers, slots)
        side_by_side = min(on_host, profile.cores)
        turns = on_host / side_by_side
    side = profile.side(side_by_side)
    micro_batches = -(-slots // (scaling.base if scaling.weak else workers))
    return RankWork(
        forward=turns * side.forward,
        backward=turns * side.backward,
        micro_batches=micro_batches,
        optimizer=turns * side.optimizer,
        other=turns * side.other,
        spread=side.spread,
        in_turns=turns,
        buckets=profile.buckets,
        width=profile.width,
        facts=8 * numbers(workers),
        buffers=profile.buffers,
        loading=turns * micro_batches * side.loading,
    )
