"""The open window of a Stepper: the current micro-batch, and the facts that this rank reports."""

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
    """The micro-batch that is being computed."""

    last: bool
    row: int
    """Row for its values in tensors with a row per slot: the slot in exact mode, else 0."""
    done: bool = False
    """Whether `backward` was called for it."""
    weight: float | Tensor = 0.0


class OpenWindow:
    """A window that was begun, and that `step()` has not ended.

    Args:
        ours: the Loader's window; None for a plain list of batches, whose slots have no numbers.
        steps: steps before this one.
        facts: the message of this rank.
        rank: this rank.
        reports: whether this rank reports the micro-batches of its replica.
        samples: samples of each rank if no message reports them; () if the facts report them.
        loss_scale: factor of the losses; None if the ranks must still agree on it.
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
        """The step number that selects the random streams."""
        self.micro: MicroBatch | None = None
        self.backwards = 0
        self.record: Computed | None = None
        """Digests of what this rank computes, if the step is witnessed."""
        self.summed: tuple[Facts, float] | None = None
        """The facts of the step and the remaining divisor; None until the sum is complete."""
        # gives micro-batches of a plain list slot numbers that no other rank uses
        self._first_slot, self._reports = rank * 2**32, reports

    def slot(self, place: int) -> int:
        """The number of this rank's micro-batch at `place`."""
        return self._first_slot + place if self.ours is None else self.ours.slots[place]

    def begin(self, place: int, batch: object, last: bool, row: int) -> MicroBatch:
        """Begin the micro-batch at `place`."""
        self.micro = MicroBatch(last, row)
        self.count(place)
        if self.record is not None:
            self.record.open(self.slot(place), batch)
        return self.micro

    def end(self, buffers: Callable[[], Sequence[tuple[str, Tensor]]]) -> None:
        """End the micro-batch. `buffers()` returns the buffers as its forward left them."""
        if self.record is not None and self.micro is not None:
            self.record.shut(self.micro.weight, buffers())
        self.micro = None

    def count(self, place: int) -> None:
        """Count the samples of the micro-batch at `place`, if their number is known."""
        if self.ours is not None and self._reports:
            self.facts.add_samples(self.ours.counts[place])

    def note(self, weight: float | Tensor, loss: Tensor, row: int = 0) -> None:
        """Add a micro-batch's weight and sum of losses to the facts."""
        if self._reports:
            self.facts.add(weight, loss, row)


def check_ended(opened: OpenWindow | None, *, stray: bool) -> OpenWindow:
    """Return the window that `step()` ends. Raises UsageError if `step()` is not allowed now.
    `stray`: whether gradients arrived outside of `Stepper.backward()`.
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
    """Return the samples of each rank, for a rank that steps alone: those of the Loader's window,
    else zeros. Return () if the facts report them.
    """
    if told is everyone:
        return ()
    if ours is None:
        return (0,) * everyone.size
    return ours.samples_by_rank(everyone.rank, everyone.size)


class LossScale:
    """The factor of the losses with fp16: a power of two near 1 / the step's weight. Without it,
    sums over a large batch overflow where means would not.

    A power of two adds no rounding, and all ranks use the same. For a Loader's window the number of
    samples of a step gives the weight. For other windows it is the weight of the step before; in
    the first step the ranks exchange their expected weights at the first backward.
    """

    def __init__(self, scaler: GradScaler | None, device: torch.device) -> None:
        self._wanted, self._device = scaler is not None and scaler.is_enabled(), device
        self._weight, self._micro_batches = 0.0, 1
        if scaler is not None and self._wanted:
            # the scaler creates its state at the first loss, and a rank may have no loss
            scaler.scale(torch.zeros((), device=device))

    def begin(self, window: object) -> float | None:
        """Return the factor for a window; None if the ranks must agree on it first."""
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
        """Return the factor for a step. `weight`: the approximate weight of each micro-batch on
        this rank. Every rank of `group` calls it.
        """
        total = torch.full(
            (), float(weight) * self._micro_batches, dtype=torch.float64, device=self._device
        )
        group.all_reduce(total, place="for the first loss scale").wait()
        return _near_one_over(total.item() or 1.0)

    def note(self, weight: float) -> None:
        """Record the weight of a step, over all ranks."""
        self._weight = weight or self._weight


def _near_one_over(weight: float) -> float:
    return 2.0 ** -math.ceil(math.log2(weight))


def with_last(items: Iterable[Batch]) -> Iterator[tuple[Batch, bool]]:
    """Yield each item and whether it is the last. It reads one item ahead."""
    iterator = iter(items)
    try:
        item = next(iterator)
    except StopIteration:
        return
    for following in iterator:
        yield item, False
        item = following
    yield item, True
