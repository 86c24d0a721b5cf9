"""The batch plan of a training: how each epoch is cut into steps, and the samples of each
micro-batch.

An order of samples is cut into micro-batches by position. If the order makes the micro-batches
itself, their numbers are cut instead. The "samples" of that plan are micro-batches, with
`micro_batches` of them in a step, and epochs may differ in length.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np

from lockstep.data.orders import Batches, Order
from lockstep.data.windows import Cut, Plan, counted, shares
from lockstep.errors import UsageError

# positions in one call of an order: a permutation takes as long for one as for a hundred
_AT_ONCE = 4096


class ByPosition:
    """An order of samples, cut by one plan that is the same in every epoch."""

    def __init__(self, order: Order, plan: Plan) -> None:
        self.order: Order = order
        self._plan = plan

    def plan(self, epoch: int) -> Plan:
        return self._plan

    def first(self, epoch: int) -> int:
        """Return the number of the epoch's first step, counted over all epochs."""
        return epoch * self._plan.steps_per_epoch

    def resume(self, epoch: int, first: int) -> None:
        """Take the number of the epoch's first step from a saved state. Raises UsageError if this
        plan knows another number.
        """
        _compare_first(epoch, first, self.first(epoch))

    def indices(self, epoch: int, steps: range, slots: range) -> Iterator[list[int]]:
        """Yield the sample indices of each micro-batch in these slots of these steps. Step 0 is the
        epoch's first.
        """
        plan, mine = self._plan, self._places(slots)
        if not mine:
            return
        within = np.arange(mine.start, mine.stop, dtype=np.int64)
        at_once = -(-_AT_ONCE // len(mine))
        for first in range(steps.start, steps.stop, at_once):
            begins = (
                np.arange(first, min(first + at_once, steps.stop), dtype=np.int64)
                * plan.global_batch
            )
            positions = (begins[:, None] + within).ravel()
            found = self.order.at(epoch, positions[positions < plan.samples]).tolist()
            for begin in range(0, len(found), len(mine)):  # one step each
                end = min(begin + len(mine), len(found))
                for start in range(begin, end, plan.micro_batch):
                    yield found[start : min(start + plan.micro_batch, end)]

    def _places(self, slots: range) -> range:
        """Return the positions of these slots in a full step, counted from the step's first."""
        most = self._plan.global_batch
        return range(
            min(slots.start * self._plan.micro_batch, most),
            min(slots.stop * self._plan.micro_batch, most),
        )

    def counts(self, cut: Cut, slots: range) -> None:
        """Return None: each slot has as many samples as positions."""
        return

    def describe(self, size: int, owner: str = "rank", by_rank: tuple[int, ...] = ()) -> str:
        return self._plan.describe(size, owner, by_rank)

    def fields(self) -> dict[str, Any]:
        """Return the sizes that must not change during a training, by name."""
        return {
            "global_batch": self._plan.global_batch,
            "micro_batch": self._plan.micro_batch,
            "drop_last": self._plan.drop_last,
        }


class ByBatch:
    """An order that makes the micro-batches itself; each step has `micro_batches` of them."""

    def __init__(self, order: Batches, micro_batches: int, *, drop_last: bool) -> None:
        self.order: Batches = order
        self._size, self._drop_last = micro_batches, drop_last
        self._firsts = {0: 0}
        # each micro-batch is requested twice: for its samples, and for their number
        self._batch = lru_cache(maxsize=512)(self._find)

    def plan(self, epoch: int) -> Plan:
        count = self.order.count(epoch)
        if self._drop_last and count < self._size:
            raise UsageError(
                "only-step-dropped",
                when=f"epoch {epoch}",
                have=counted(count, "micro-batch", "es"),
                need=f"micro_batches={self._size}",
            )
        return Plan(
            samples=count, global_batch=self._size, micro_batch=1, drop_last=self._drop_last
        )

    def first(self, epoch: int) -> int:
        known = max(number for number in self._firsts if number <= epoch)
        for number in range(known, epoch):
            self._firsts[number + 1] = self._firsts[number] + self.plan(number).steps_per_epoch
        return self._firsts[epoch]

    def resume(self, epoch: int, first: int) -> None:
        _compare_first(epoch, first, self._firsts.get(epoch, first))
        self._firsts[epoch] = first

    def indices(self, epoch: int, steps: range, slots: range) -> Iterator[list[int]]:
        plan = self.plan(epoch)
        for place in steps:
            cut = plan.at(place, epoch, place)
            for number in map(cut.positions, slots):
                if number:  # the last slots of a short step are empty
                    yield self._batch(epoch, number.start)

    def counts(self, cut: Cut, slots: range) -> list[int]:
        """Return the number of samples in each of these slots of a step, none of them empty."""
        return [len(self._batch(cut.epoch, cut.positions(slot).start)) for slot in slots]

    def _find(self, epoch: int, number: int) -> list[int]:
        found: list[int] = self.order.batch(epoch, number).tolist()
        return found

    def describe(self, size: int, owner: str = "rank", by_rank: tuple[int, ...] = ()) -> str:
        made = (
            f"{counted(self._size, 'micro-batch', 'es')} a step, as {type(self.order).__name__}"
            " makes them"
        )
        return f"{made}; {shares(self._size, size, owner, by_rank)}"

    def fields(self) -> dict[str, Any]:
        return {"micro_batches": self._size, "drop_last": self._drop_last}


BatchPlan = ByPosition | ByBatch
"""How epochs are cut into steps and micro-batches. All answers are the same on every rank."""


def _compare_first(epoch: int, theirs: int, ours: int) -> None:
    if theirs != ours:
        difference = f"epoch {epoch} began with step {theirs} and begins with step {ours}"
        raise UsageError("another-training", place="the state", differences=difference)
