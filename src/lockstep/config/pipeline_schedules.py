"""Pipeline schedules: the order in which ranks run the forwards and backwards of their stages. The
orders are those of torch's own schedules.

    naive          one micro-batch after the other, one rank active at a time: a simple reference
    gpipe          all forwards, then all backwards (Huang et al., 2019)
    1f1b           as gpipe, but each backward as early as possible: the same bubbles, fewer
                   activations in memory (PipeDream-Flush)
    interleaved    1f1b with several stages per rank (2; "interleaved:3" for 3): shorter bubbles,
                   more messages (Megatron-LM)
    zero-bubble    1f1b with each backward in two parts: gradients of the inputs, which other ranks
                   wait for, and gradients of the weights, which fill bubbles.
                   ZB-H1 of Qi et al. (2023). torch's ZBV needs two stages per rank in a V, and is
                   faster only if forward and both parts take equally long

Stage s is on rank s modulo the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from lockstep.config import knob
from lockstep.errors import UsageError

if TYPE_CHECKING:
    from torch.distributed.pipelining import PipelineStage

Kind = Literal["F", "B", "I", "W"]
"""F: forward, B: backward, I and W: the parts of a backward for the inputs and the weights."""
NAMES = ("naive", "gpipe", "1f1b", "interleaved", "zero-bubble")
_PER_RANK = {"interleaved": 2}
_SEVERAL = ("interleaved", "zero-bubble")


@dataclass(frozen=True, slots=True)
class StageWork:
    """One forward, backward, or part of a backward that a rank runs."""

    kind: Kind
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"


@dataclass(frozen=True, slots=True)
class PipelineSchedule:
    """A schedule's name and how many stages a rank holds."""

    name: str
    per_rank: int = 1

    @classmethod
    def read(cls, text: str) -> PipelineSchedule:
        """Read a text such as `1f1b` or `interleaved:3`. Raises UsageError for an invalid one."""
        name, colon, stages = text.partition(":")
        knob.chosen("schedule", name, NAMES)
        fewest = _PER_RANK.get(name, 1)
        if not colon:
            return cls(name, fewest)
        if name not in _SEVERAL:
            raise UsageError("one-stage-a-rank", schedule=text, name=name, stages=stages)
        with knob.within(f"schedule={text!r}"):
            return cls(name, knob.whole("stages", knob.value_of(stages), fewest))

    def __str__(self) -> str:
        return (
            self.name
            if self.per_rank == _PER_RANK.get(self.name, 1)
            else f"{self.name}:{self.per_rank}"
        )

    def count(self, ranks: int) -> int:
        """Return the number of stages of the whole pipeline."""
        return ranks * self.per_rank

    def stages_of(self, rank: int, ranks: int) -> range:
        """Return the numbers of the stages that a rank holds."""
        return range(rank, self.count(ranks), ranks)

    def why_not(self, ranks: int, micro_batches: int) -> str:
        """Return why this number of micro-batches cannot run in this order; "" if it can."""
        if self.name == "1f1b" and micro_batches < ranks:
            return (
                f"{micro_batches} micro-batch{'es' * (micro_batches != 1)} for {ranks} stages: 1f1b"
                " needs at least as many micro-batches as stages"
            )
        rounds = max(1, micro_batches // ranks)
        if self.name in _SEVERAL and micro_batches % rounds:
            return (
                f"{micro_batches} micro-batches on {ranks} ranks make {rounds} rounds, and"
                f" {micro_batches} is not a multiple of {rounds}: {self.name} needs equal rounds,"
                f" such as {micro_batches // ranks * ranks} micro-batches"
            )
        return ""

    def check(self, ranks: int, micro_batches: int) -> None:
        """Raise a UsageError if this number of micro-batches cannot run in this order."""
        if ranks < 1 or micro_batches < 1:
            raise UsageError("empty-pipeline", ranks=ranks, micro_batches=micro_batches)
        reason = self.why_not(ranks, micro_batches)
        if reason:
            raise UsageError("schedule-does-not-fit", schedule=str(self), reason=reason)

    def instead(self) -> PipelineSchedule:
        """Return the schedule that can run any number of micro-batches over the same stages:
        gpipe.
        """
        return PipelineSchedule("gpipe", self.per_rank)

    def bubble(self, ranks: int, micro_batches: int, backward: float = 2.0) -> float:
        """Return the fraction of a step in which a rank idles, by the textbook formula. It assumes
        equal stages and free messages.

        `backward` is the time of a backward, in forwards. It matters only for zero-bubble: each
        rank but one adds a gap of (forward + backward for inputs - backward for weights) (Qi et
        al., 2023, section 2), but never less than the backward for inputs.
        """
        others = ranks - 1
        if self.name == "naive":
            return others / ranks
        if self.name == "zero-bubble":
            gap = others * max(1.0, backward / 2)
            return gap / (self.per_rank * micro_batches * (1 + backward) + gap)
        return others / (self.per_rank * micro_batches + others)

    @property
    def formula(self) -> str:
        """The formula of `bubble` as text: p ranks, m micro-batches, and a backward that takes as
        long as b forwards.
        """
        times = "m" if self.per_rank == 1 else f"{self.per_rank}m"
        if self.name == "naive":
            return "(p-1)/p"
        return (
            f"(p-1)/({times}+p-1)"
            if self.name != "zero-bubble"
            else f"g/({times}(1+b)+g) with g=(p-1)max(1,b/2)"
        )

    def made(
        self, stages: Sequence[PipelineStage], micro_batches: int, loss: Callable[..., Any] | None
    ) -> Any:
        """Return torch's schedule over this rank's stages. Gradients are summed, not averaged. For
        naive, create it for one micro-batch, and call it once for each.
        """
        from torch.distributed.pipelining import (
            Schedule1F1B,
            ScheduleGPipe,
            ScheduleInterleaved1F1B,
            ScheduleInterleavedZeroBubble,
            ScheduleLoopedBFS,
        )

        if self.name in ("naive", "gpipe", "1f1b") and self.per_rank == 1:
            single = Schedule1F1B if self.name == "1f1b" else ScheduleGPipe
            return single(stages[0], micro_batches, loss_fn=loss, scale_grads=False)
        several = {
            "gpipe": ScheduleLoopedBFS,
            "interleaved": ScheduleInterleaved1F1B,
            "zero-bubble": ScheduleInterleavedZeroBubble,
        }
        return several[self.name](list(stages), micro_batches, loss_fn=loss, scale_grads=False)

    def order(self, ranks: int, micro_batches: int) -> list[list[StageWork]]:
        """Return the work of every rank, in order. It comes from torch's schedules, but needs no
        process group. Raises UsageError like `check`.
        """
        self.check(ranks, micro_batches)
        if self.name == "naive":
            return [
                [StageWork(kind, rank, each) for each in range(micro_batches) for kind in _BOTH]
                for rank in range(ranks)
            ]
        stages: Any = [
            _StandIn(number, self.count(ranks), ranks) for number in self.stages_of(0, ranks)
        ]
        orders = self.made(stages, micro_batches, _no_loss).pipeline_order
        return [
            _numbered([_work(action) for action in orders[rank] if action is not None])
            for rank in range(ranks)
        ]


_BOTH: tuple[Kind, Kind] = ("F", "B")


class _StandIn:
    """The attributes of a stage that torch's schedules read to build their order."""

    submod = None

    def __init__(self, number: int, count: int, ranks: int) -> None:
        self.stage_index, self.num_stages = number, count
        self.group_rank, self.group_size = 0, ranks
        self.is_first, self.is_last = number == 0, number == count - 1


def _no_loss(*_: Any) -> None:
    """Stand in for the loss function, which is not needed to build an order."""


def _work(action: Any) -> StageWork | None:
    kind = action.computation_type.value
    return (
        StageWork(kind, action.stage_index, action.microbatch_index)
        if kind in ("F", "B", "I", "W")
        else None
    )


def _numbered(found: Sequence[StageWork | None]) -> list[StageWork]:
    """Number the forwards of every stage from 0. In `pipeline_order` (not when it runs) the last
    stage of torch's Schedule1F1B numbers them from 1.
    """
    work = [each for each in found if each is not None]
    first: dict[int, int] = {}
    for each in work:
        if each.kind == "F":
            first[each.stage] = min(first.get(each.stage, each.micro_batch), each.micro_batch)
    return [
        (
            StageWork(each.kind, each.stage, each.micro_batch - first[each.stage])
            if each.kind == "F"
            else each
        )
        for each in work
    ]
