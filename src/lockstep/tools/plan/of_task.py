"""From what was measured of a task to the work of a rank among any number of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from lockstep.config.task import Task
from lockstep.data.windows import Plan
from lockstep.gradients.facts import numbers
from lockstep.tools.plan.work import RankWork
from lockstep.tools.timing.profile import Profile


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanScaling:
    """How a step is dealt out."""

    base: int
    """The number of ranks that others are compared with: one that is small."""
    weak: bool = False
    """More ranks make the global batch larger: each keeps the micro-batches that it has at
    `base`.
    """
    per_host: int | None = 1
    """Ranks that share the cores of one host; None: all of them."""
    loaders: int = 0
    """Loader workers of each rank."""

    def on_host(self, workers: int) -> int:
        """Ranks that compute on one host at once."""
        return workers if self.per_host is None else min(workers, self.per_host)


def slots_of(sizes: Profile | Task) -> int:
    """Micro-batches of the task's own global batch."""
    return Plan(
        samples=sizes.global_batch, global_batch=sizes.global_batch, micro_batch=sizes.micro_batch
    ).slots


def sides(
    scaling: PlanScaling, counts: Iterable[int], slots: int, cores: int, device: str
) -> list[int]:
    """How many ranks must be profiled side by side: as many as share a host, but no more than it
    has cores. On GPUs nobody shares.
    """
    if device == "cuda":
        return [1]
    return sorted(
        {min(_computing(scaling, count, slots), cores) for count in (*counts, scaling.base)}
    )


def talking(scaling: PlanScaling, counts: Iterable[int], device: str) -> list[int]:
    """How many ranks of one host must be heard talking: those that share its cores, and where
    each has a host of its own, two.
    """
    if device == "cuda":
        return []
    return sorted({heard(scaling, count) for count in (*counts, scaling.base) if count > 1})


def heard(scaling: PlanScaling, workers: int) -> int:
    """The number of ranks whose messages stand for those of so many."""
    return max(2, scaling.on_host(workers))


def _computing(scaling: PlanScaling, workers: int, slots: int) -> int:
    """Ranks of one host that have something to do."""
    here = scaling.on_host(workers)
    return here if scaling.weak else min(here, slots)


def samples_of(profile: Profile, scaling: PlanScaling, workers: int) -> float:
    """Of all ranks in a step."""
    if not scaling.weak:
        return profile.global_batch
    return profile.global_batch * workers / scaling.base


def work_of(profile: Profile, scaling: PlanScaling, workers: int) -> RankWork:
    """Of the rank that has most, among so many ranks, each with micro-batches of its own.

    More ranks than cores take turns on them: everything takes as many times as long.
    """
    here = _computing(scaling, workers, slots_of(profile))
    beside = 1 if profile.device == "cuda" else min(here, profile.cores)
    turns = 1.0 if profile.device == "cuda" else here / beside
    side = profile.side(beside)
    micro_batches = -(-slots_of(profile) // (scaling.base if scaling.weak else workers))
    loading, ahead = _loading(profile, scaling, here, micro_batches * side.loading)
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
        loading=loading if ahead else turns * loading,
        ahead=ahead,
        samples=samples_of(profile, scaling, workers) / workers,
    )


def _loading(profile: Profile, scaling: PlanScaling, here: int, alone: float) -> tuple[float, bool]:
    """Seconds of loading in a step, and whether it goes on beside the computation.

    Loader workers share the cores that the host's ranks leave over; where there are none, loading
    takes its time from the computation.
    """
    busy = here if profile.device == "cpu" else 0
    left = profile.cores - busy
    if not scaling.loaders or left <= 0:
        return alone, False
    return alone * here / min(left, scaling.loaders * here), True


def gradient_work_of(profile: Profile, scaling: PlanScaling, workers: int) -> RankWork:
    """Only its forwards, backwards and gradients: all that a ratio of communication to
    computation looks at.
    """
    found = work_of(profile, scaling, workers)
    return RankWork(
        forward=found.forward,
        backward=found.backward,
        micro_batches=found.micro_batches,
        buckets=found.buckets,
        width=found.width,
    )
