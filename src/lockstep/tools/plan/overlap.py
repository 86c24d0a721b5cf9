"""When the last gradient has arrived: the computation and the link side by side, both one thing
after the other. Pure arithmetic of seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepEnd:
    """Seconds after the step's begin."""

    computed: float
    """When the last backward was over."""
    arrived: float
    """When the last message was."""
    busy: float
    """How long the link was in use."""


@dataclass(frozen=True, slots=True)
class QueuedBucket:
    """How long a bucket of gradients takes the link."""

    ready: float
    """The share of the last backward after which it can leave."""
    early: float
    late: float
    """Of what waits for the end of the backward."""


def replicated(before: float, backward: float, buckets: Sequence[QueuedBucket]) -> StepEnd:
    """Every rank holds the model. `before` are the seconds until the last backward begins: only
    in that one do gradients leave.
    """
    computed = before + backward
    link = 0.0
    for bucket in buckets:
        link = max(link, before + bucket.ready * backward) + bucket.early if bucket.early else link
    for bucket in buckets:
        link = max(link, computed) + bucket.late if bucket.late else link
    return StepEnd(
        computed, max(computed, link), sum(bucket.early + bucket.late for bucket in buckets)
    )


@dataclass(frozen=True, slots=True)
class GatheredLayers:
    """Layers whose parameters are gathered together, before they are used, and whose gradients
    are scattered.
    """

    ready: float
    """The share of a backward after which their gradients are complete."""
    gather: float
    scatter: float


def sharded(
    forward: float, backward: float, micro_batches: int, groups: Sequence[GatheredLayers]
) -> StepEnd:
    """Every rank holds a part of each parameter (FSDP, ZeRO-3): layers are gathered one ahead of
    the one that computes, forward and backward.

    `groups` in the order of the backward. The layers that end the forward begin the backward, and
    stay gathered between the two.
    """
    clock = _Clock()
    shares = [
        after.ready - before
        for before, after in zip([0.0, *(each.ready for each in groups)], groups, strict=False)
    ]
    rest = 1 - groups[-1].ready  # what is computed behind the last gradient
    for _ in range(micro_batches):
        turned = list(reversed(groups))
        clock.walk(
            [each.gather for each in turned],
            [forward * share for share in reversed(shares)],
            [0.0] * len(groups),
        )
        clock.computed += forward * rest
        clock.walk(
            [0.0, *(each.gather for each in groups[1:])],
            [backward * share for share in shares],
            [each.scatter for each in groups],
        )
        clock.computed += backward * rest
    return StepEnd(clock.computed, max(clock.computed, clock.link), clock.busy)


class _Clock:
    """A rank that computes and a link that carries."""

    def __init__(self) -> None:
        self.computed = self.link = self.busy = 0.0

    def walk(
        self, gathers: Sequence[float], computations: Sequence[float], scatters: Sequence[float]
    ) -> None:
        """Layer after layer; the next one's parameters are asked for when this one begins."""
        here = self._carry(gathers[0], self.computed)
        for place, seconds in enumerate(computations):
            begin = max(self.computed, here)
            here = self._carry(gathers[place + 1], begin) if place + 1 < len(gathers) else begin
            self.computed = begin + seconds
            self._carry(scatters[place], self.computed)

    def _carry(self, seconds: float, asked: float) -> float:
        """When it has arrived."""
        if not seconds:
            return asked
        self.link = max(self.link, asked) + seconds
        self.busy += seconds
        return self.link
