"""What all ranks must know of a step besides its gradients: a few float64 numbers in one message.

They leave before the last micro-batch's backward, so they cost no time: by the end of it they have arrived. They are exact in
whatever dtype the gradients travel, and because everybody gets the same sums, everybody draws the same conclusions (the divisor,
whether to skip, whether to stop) without another message.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.collectives.group import Group
from lockstep.collectives.tree import ABSENT, add_rows
from lockstep.gradients.reading import Reading

_WEIGHT, _STOP, _NEWLY_MOVING, _BY_RANK = range(4)
_ROWS = ("samples", "losses", "busy", "waited", "each", "digests", "digesting")  # one number of each rank


def numbers(ranks: int) -> int:
    """How many float64 numbers the facts of a step of so many ranks are, without slots."""
    return _BY_RANK + len(_ROWS) * ranks


@dataclass(frozen=True, slots=True)
class Facts:
    """Summed over all ranks: the weights, the losses, how many asked to stop, how many saw a buffer begin to move; by rank, samples and losses.

    And how the step before went, by rank, in seconds: what it computed, what it waited for others, and what one of its micro-batches took it,
    loading included (0: it had none). `digests_by_rank` are of what a step overwrites (0: not taken), each taken in `digesting_by_rank` seconds.
    """

    weight: float
    loss: float
    stop: float
    newly_moving: float
    samples_by_rank: tuple[int, ...]
    losses_by_rank: tuple[float, ...]
    busy_by_rank: tuple[float, ...] = ()
    waited_by_rank: tuple[float, ...] = ()
    each_by_rank: tuple[float, ...] = ()
    digests_by_rank: tuple[float, ...] = ()
    digesting_by_rank: tuple[float, ...] = ()


class FactsMessage:
    """This rank's share of the facts: filled while the window is walked, sent once, waited for once.

    With `slots` weights and losses travel slot by slot, and are added up along the tree of exact mode.
    """

    def __init__(self, group: Group, device: torch.device, slots: int = 0) -> None:
        self._group = group
        self._values = torch.zeros(numbers(group.size) + 2 * slots, dtype=torch.float64, device=device)
        self._sum: Reading | None = None
        self._slots = slots
        self._by_slot = self._values[numbers(group.size) :].view(2, slots)
        self._by_slot.fill_(ABSENT)

    @property
    def sent(self) -> bool:
        return self._sum is not None

    def add(self, weight: float | Tensor, loss: Tensor, slot: int = 0) -> None:
        """Count a micro-batch: its weight and its sum of losses."""
        assert not self.sent
        if self._slots:
            self._by_slot[0, slot] = weight
            self._by_slot[1, slot] = loss
        self._values[_WEIGHT] += weight
        self._values[self._mine("losses")] += loss

    def add_samples(self, count: int) -> None:
        self._values[self._mine("samples")] += count

    def add_times(self, busy: float, waited: float, each: float) -> None:
        """Of this rank's step before, in seconds."""
        self._values[self._mine("busy")] = busy
        self._values[self._mine("waited")] = waited
        self._values[self._mine("each")] = each

    def add_digest(self, digest: int, seconds: float) -> None:
        """A digest of what this rank began the step with (52 bits, so that float64 has it exactly), and what it took."""
        self._values[self._mine("digests")] = digest
        self._values[self._mine("digesting")] = seconds

    def _mine(self, row: str) -> int:
        return _BY_RANK + _ROWS.index(row) * self._group.size + self._group.rank

    def send(self, *, stop: bool, newly_moving: bool) -> None:
        if stop:
            self._values[_STOP] = 1
        if newly_moving:
            self._values[_NEWLY_MOVING] = 1
        self._sum = Reading(self._values, self._group.all_reduce_small(self._values, place="for the facts of a step"))

    def wait(self) -> Facts:
        assert self._sum is not None, "the facts leave before they are waited for"
        weight, stop, newly_moving, *rest = self._sum.list()
        size = self._group.size
        samples, losses, *others = (tuple(rest[place * size : (place + 1) * size]) for place in range(len(_ROWS)))
        loss = sum(losses)
        if self._slots:
            weight, loss = (add_rows(torch.tensor(each, dtype=torch.float64)).item() for each in _halves(rest[len(_ROWS) * size :]))
        return Facts(weight, loss, stop, newly_moving, tuple(map(int, samples)), losses, *others)


def _halves(values: list[float]) -> tuple[list[float], list[float]]:
    return values[: len(values) // 2], values[len(values) // 2 :]
