"""The window that a Stepper is walking: which micro-batch it is at, and what this rank has to
tell of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor
from torch.amp import GradScaler

from lockstep.checks.witness import Computed
from lockstep.collectives.group import Group
from lockstep.data.windows import Window
from lockstep.errors import UsageError
from lockstep.gradients.facts import Facts, FactsMessage

Batch = TypeVar("Batch")


@dataclass(slots=True)
class MicroBatch:
    """One that is being walked."""

    last: bool
    row: int
    """Among what is kept by slot: the slot in exact mode, else 0."""
    done: bool = False
    """Its gradients were computed."""
    weight: float | Tensor = 0.0


class OpenWindow:
    """One that was begun, and that `step()` has not ended. `ours` is None for a plain list of
    batches, whose slots have no numbers.

    `reports`: whether this rank counts micro-batches for its replica. `samples`: of each rank,
    where no message tells; () where the facts tell.
    """

    def __init__(
        self,
        ours: Window | None,
        steps: int,
        facts: FactsMessage,
        *,
        rank: int,
        reports: bool,
        samples: tuple[int, ...],
        loss_scale: float | None,
    ) -> None:
        self.ours, self.facts, self.samples = ours, facts, samples
        self.loss_scale = loss_scale
        """None until the ranks have agreed on it."""
        self.step = steps if ours is None else ours.step
        """The one that its randomness belongs to."""
        self.micro: MicroBatch | None = None
        self.backwards = 0
        self.record: Computed | None = None
        """Of a step that is witnessed, what this rank computes."""
        self.summed: tuple[Facts, float] | None = None
        """Once the sum is complete: the step's facts, and the divisor that is left."""
        # of a plain list: slots that no other rank has
        self._first_slot, self._reports = rank * 2**32, reports

    def slot(self, place: int) -> int:
        """The number of this rank's micro-batch at `place`."""
        return self._first_slot + place if self.ours is None else self.ours.slots[place]

    def begin(self, place: int, batch: object, last: bool, row: int) -> MicroBatch:
        """A micro-batch begins."""
        self.micro = MicroBatch(last, row)
        self.count(place)
        if self.record is not None:
            self.record.open(self.slot(place), batch)
        return self.micro

    def end(self, buffers: Callable[[], Sequence[tuple[str, Tensor]]]) -> None:
        """It is over, and has moved the buffers to what they are now."""
        if self.record is not None and self.micro is not None:
            self.record.shut(self.micro.weight, buffers())
        self.micro = None

    def count(self, place: int) -> None:
        """The samples of the micro-batch at `place`, where they are known."""
        if self.ours is not None and self._reports:
            self.facts.add_samples(self.ours.counts[place])

    def note(self, weight: float | Tensor, loss: Tensor, row: int = 0) -> None:
        """Of a micro-batch: its weight, and the sum of its losses."""
        if self._reports:
            self.facts.add(weight, loss, row)


def check_ended(opened: OpenWindow | None, *, stray: bool) -> OpenWindow:
    """The window that `step()` ends. `stray`: whether gradients arrived outside of `backward()`.
    Raises UsageError out of its place.
    """
    if opened is None:
        raise UsageError("step-without-window")
    if opened.micro is not None:
        raise UsageError("step-inside-window")
    if opened.ours is not None and opened.ours.cut.turned:
        raise UsageError("loop-left-while-witnessed")
    if stray and not opened.backwards:
        raise UsageError("backward-not-by-stepper")
    return opened


def samples_told(ours: Window | None, told: Group, everyone: Group) -> tuple[int, ...]:
    """Of each rank, where ranks tell each other nothing: in a window of ours by what is dealt out;
    () where the facts tell.
    """
    if told is everyone:
        return ()
    if ours is None:
        return (0,) * everyone.size
    return ours.samples_by_rank(everyone.rank, everyone.size)


class LossScale:
    """With fp16, sums over a large batch overflow where means did not: the loss is scaled by a
    power of two, near 1 / the step's weight.

    That is exact, and the same on all ranks. A Loader's window says how many samples its step has.
    For any other window the weight of the step before serves; the first time the ranks tell each
    other, at their first backward, what they expect.
    """

    def __init__(self, scaler: GradScaler | None, device: torch.device) -> None:
        self._wanted, self._device = scaler is not None and scaler.is_enabled(), device
        self._weight, self._micro_batches = 0.0, 1
        if scaler is not None and self._wanted:
            # it makes its state at the first loss, and a rank may have none
            scaler.scale(torch.zeros((), device=device))

    def begin(self, window: object) -> float | None:
        """The scale of a window's step; None where it has to be agreed on."""
        if not self._wanted:
            return 1.0
        self._micro_batches = len(window) if isinstance(window, Sized) else 1
        weight = (
            window.cut.micro_batch * window.cut.slots
            if isinstance(window, Window)
            else self._weight
        )
        return _near_one_over(weight) if weight else None

    def agree(self, group: Group, weight: float | Tensor) -> float:
        """The scale of a step whose micro-batches have about this weight on this rank. Every
        rank of `group` calls it.
        """
        total = torch.full(
            (), float(weight) * self._micro_batches, dtype=torch.float64, device=self._device
        )
        group.all_reduce(total, place="for the first loss scale").wait()
        return _near_one_over(total.item() or 1.0)

    def note(self, weight: float) -> None:
        """A step's weight, over all ranks."""
        self._weight = weight or self._weight


def _near_one_over(weight: float) -> float:
    return 2.0 ** -math.ceil(math.log2(weight))


def with_last(items: Iterable[Batch]) -> Iterator[tuple[Batch, bool]]:
    """Each item and whether it is the last, by looking one ahead."""
    iterator = iter(items)
    try:
        item = next(iterator)
    except StopIteration:
        return
    for following in iterator:
        yield item, False
        item = following
    yield item, True
