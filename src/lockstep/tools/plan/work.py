"""The work of a rank in a step, as a forecast needs it: from the profile of a task for any number of
ranks, or from three numbers. docs/explore/index.html computes the same from three numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from lockstep.timing import facts_bytes
from lockstep.tools.plan.communication import WIDTH
from lockstep.tools.plan.forecast import RankWork
from lockstep.tools.plan.profile import GradientBucket, Profile
from lockstep.tools.timing.output_files import counted

# share of a micro-batch's time: a backward has two products (for the gradients of the inputs and of
# the weights), a forward has one
BACKWARD = 2 / 3


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

    def computing(self, workers: int, slots: int) -> int:
        """Return the number of ranks of one host that have one of `slots` micro-batches."""
        on_host = min(workers, self.per_host)
        return on_host if self.weak else min(on_host, slots)

    def talking(self, workers: int) -> int:
        """Return the number of ranks of one host whose messages represent those of `workers` ranks:
        those that share its cores, but at least two.
        """
        return max(2, min(workers, self.per_host))

    def sides(self, counts: Iterable[int], slots: int, cores: int) -> list[int]:
        """Return the numbers of ranks to profile side by side on CPUs: as many as share a host, but
        at most one per core.
        """
        computing = [self.computing(count, slots) for count in (*counts, self.base)]
        return sorted({min(ranks, cores) for ranks in computing})

    def messages(self, counts: Iterable[int]) -> list[int]:
        """Return the numbers of ranks of one host whose messages must be timed on CPUs."""
        return sorted({self.talking(count) for count in (*counts, self.base) if count > 1})

    def notes(self, counts: Iterable[int], slots: int) -> Iterator[str]:
        """Yield sentences about the rows of a plan."""
        kind = "the global batch stays the same (strong scaling)"
        if self.weak:
            kind = f"every rank keeps its share of {self.base} (weak scaling)"
        yield f"{kind}; efficiency is relative to {counted(self.base, 'rank')}"
        idle = [workers for workers in counts if workers > slots]
        if idle and not self.weak:
            yield (
                f"a step has {counted(slots, 'micro-batch', 'es')}: among {idle[0]} ranks some have"
                " none and wait. Use a smaller micro_batch, a larger global_batch, or --weak"
            )


def work_of(profile: Profile, scaling: PlanScaling, workers: int) -> RankWork:
    """Return the work of the rank with the most micro-batches, among `workers` ranks.

    If a host has more ranks than cores, they take turns: all times grow in proportion. GPU ranks
    share nothing.
    """
    side_by_side = 1
    turns = 1.0
    if profile.device != "cuda":
        on_host = scaling.computing(workers, profile.slots)
        side_by_side = min(on_host, profile.cores)
        turns = on_host / side_by_side
    side = profile.sides[side_by_side]
    micro_batches = -(-profile.slots // (scaling.base if scaling.weak else workers))
    return RankWork(
        forward=turns * side.forward,
        backward=turns * side.backward,
        micro_batches=micro_batches,
        optimizer=turns * side.optimizer,
        other=turns * side.other,
        loading=turns * micro_batches * side.loading,
        spread=side.spread,
        in_turns=turns,
        buckets=profile.buckets,
        width=profile.width,
        facts=facts_bytes(workers),
        buffers=profile.buffers,
        software=profile.messages.get(scaling.talking(workers), 0.0),
        samples=profile.global_batch * (workers / scaling.base if scaling.weak else 1),
        on_cpus=profile.device == "cpu",
    )


def given_work(gradient_mb: float, buckets: int, step_ms: float) -> RankWork:
    """Return the work of a step that is known by three numbers: 10^6 bytes of float32 gradients, the
    number of equal buckets, milliseconds of forward and backward.

    A third of the computation is the forward. Bucket i of n is complete after (i + 1)/n of the
    backward. Every rank computes as long among any number of ranks: the global batch grows.
    """
    seconds = step_ms / 1e3
    elements = math.floor(gradient_mb * 1e6 / WIDTH + 0.5)
    size, longer = divmod(elements, buckets)
    return RankWork(
        forward=(1 - BACKWARD) * seconds,
        backward=BACKWARD * seconds,
        buckets=[
            GradientBucket(ready=(number + 1) / buckets, elements=size + (number < longer))
            for number in range(buckets)
        ],
    )
