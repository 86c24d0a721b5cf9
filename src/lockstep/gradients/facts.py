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
from lockstep.gradients.reading import Reading

_WEIGHT, _STOP, _NEWLY_MOVING, _BY_RANK = range(4)


@dataclass(frozen=True, slots=True)
class Facts:
    """Summed over all ranks: the weights, how many asked to stop, how many saw a buffer begin to move; and, by rank, samples and losses."""

    weight: float
    stop: float
    newly_moving: float
    samples_by_rank: tuple[int, ...]
    losses_by_rank: tuple[float, ...]

    @property
    def loss(self) -> float:
        """The sum of the losses of all ranks, added in their order."""
        return sum(self.losses_by_rank)


class FactsMessage:
    """This rank's share of the facts: filled while the window is walked, sent once, waited for once."""

    def __init__(self, group: Group, device: torch.device) -> None:
        self._group = group
        self._values = torch.zeros(_BY_RANK + 2 * group.size, dtype=torch.float64, device=device)
        self._sum: Reading | None = None

    @property
    def sent(self) -> bool:
        return self._sum is not None

    def add(self, weight: float | Tensor, loss: Tensor) -> None:
        """Count a micro-batch: its weight and its sum of losses."""
        assert not self.sent
        self._values[_WEIGHT] += weight
        self._values[_BY_RANK + self._group.size + self._group.rank] += loss

    def add_samples(self, count: int) -> None:
        self._values[_BY_RANK + self._group.rank] += count

    def send(self, *, stop: bool, newly_moving: bool) -> None:
        if stop:
            self._values[_STOP] = 1
        if newly_moving:
            self._values[_NEWLY_MOVING] = 1
        self._sum = Reading(self._values, self._group.all_reduce_small(self._values, place="for the facts of a step"))

    def wait(self) -> Facts:
        assert self._sum is not None, "the facts leave before they are waited for"
        weight, stop, newly_moving, *by_rank = self._sum.list()
        size = self._group.size
        return Facts(weight, stop, newly_moving, tuple(int(count) for count in by_rank[:size]), tuple(by_rank[size:]))
