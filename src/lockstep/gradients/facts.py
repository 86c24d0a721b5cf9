"""What all ranks must know of a step besides its gradients: a few float64 numbers in one message.

They leave before the last micro-batch's backward, so they cost no time: by the end of it they have arrived. They are exact in
whatever dtype the gradients travel, and because everybody gets the same sums, everybody draws the same conclusions (the divisor,
whether to skip, whether to stop) without another message.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.collectives.group import Group, Work

_WEIGHT, _LOSS, _STOP, _NEWLY_MOVING, _SAMPLES = range(5)


@dataclass(frozen=True, slots=True)
class Facts:
    """Summed over all ranks: the weights, the losses, how many asked to stop, how many saw a buffer begin to move, samples by rank."""

    weight: float
    loss: float
    stop: float
    newly_moving: float
    samples_by_rank: tuple[int, ...]


class FactsMessage:
    """This rank's share of the facts: filled while the window is walked, sent once, waited for once."""

    def __init__(self, group: Group, device: torch.device) -> None:
        self._group = group
        self._values = torch.zeros(_SAMPLES + group.size, dtype=torch.float64, device=device)
        self._work: Work | None = None

    @property
    def sent(self) -> bool:
        return self._work is not None

    def add(self, weight: float | Tensor, loss: Tensor) -> None:
        """Count a micro-batch: its weight and its sum of losses."""
        assert not self.sent
        self._values[_WEIGHT] += weight
        self._values[_LOSS] += loss

    def add_samples(self, count: int) -> None:
        self._values[_SAMPLES + self._group.rank] += count

    def send(self, *, stop: bool, newly_moving: bool) -> None:
        self._values[_STOP] = float(stop)
        self._values[_NEWLY_MOVING] = float(newly_moving)
        self._work = self._group.all_reduce(self._values, place="for the facts of a step")

    def wait(self) -> Facts:
        assert self._work is not None, "the facts leave before they are waited for"
        self._work.wait()
        weight, loss, stop, newly_moving, *samples = self._values.tolist()
        return Facts(weight, loss, stop, newly_moving, tuple(int(count) for count in samples))
