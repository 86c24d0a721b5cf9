"""The window that a Stepper is walking: which micro-batch it is at, and what this rank has to tell of it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor
from torch.amp import GradScaler

from lockstep.data.windows import Window
from lockstep.gradients.facts import FactsMessage

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
    """One that was begun, and that `step()` has not ended. `ours` is None for a plain list of batches, whose slots have no numbers.

    `reports`: whether this rank counts micro-batches for its replica. `samples`: of each rank, where no message tells; () where the facts tell.
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
        loss_scale: float,
    ) -> None:
        self.ours, self.facts, self.samples, self.loss_scale = ours, facts, samples, loss_scale
        self.step = steps if ours is None else ours.step
        """The one that its randomness belongs to."""
        self.micro: MicroBatch | None = None
        self.backwards = 0
        self._first_slot, self._reports = rank * 2**32, reports  # of a plain list: slots that no other rank has

    def slot(self, place: int) -> int:
        """The number of this rank's micro-batch at `place`."""
        return self._first_slot + place if self.ours is None else self.ours.slots[place]

    def count(self, place: int) -> None:
        """The samples of the micro-batch at `place`, where they are known."""
        if self.ours is not None and self._reports:
            self.facts.add_samples(self.ours.counts[place])

    def note(self, weight: float | Tensor, loss: Tensor, row: int = 0) -> None:
        """Of a micro-batch: its weight, and the sum of its losses."""
        if self._reports:
            self.facts.add(weight, loss.detach(), row)


def loss_scale_for(window: object, scaler: GradScaler | None) -> float:
    """With fp16, sums over a large batch overflow where means did not: scale the loss by a power of two, which is exact."""
    if scaler is None or not scaler.is_enabled() or not isinstance(window, Window):
        return 1.0
    return 2.0 ** -math.ceil(math.log2(window.cut.micro_batch * window.cut.slots))


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
