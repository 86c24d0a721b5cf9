"""What all ranks must know of a step besides its gradients: a few float64 numbers in one message.

The message leaves before the last micro-batch's backward and arrives by the end of it, so it costs
no time. The numbers are exact in whatever dtype the gradients travel. All ranks get the same sums,
so all draw the same conclusions (the divisor, whether to skip, whether to stop) without another
message.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lockstep.collectives.addition_order import ABSENT, add_rows
from lockstep.collectives.group import Group
from lockstep.collectives.work import Work

# the message: these three sums, then, for each row, a number per rank
_WEIGHT, _STOP, _NEWLY_MOVING, _BY_RANK = range(4)
_SAMPLES, _LOSSES, _BUSY, _WAITED, _DIGESTS, _DIGESTING, _ROWS = range(7)


def numbers(ranks: int) -> int:
    """The number of float64 numbers in the facts of a step on so many ranks, without slots."""
    return _BY_RANK + _ROWS * ranks


@dataclass(frozen=True, slots=True)
class Facts:
    """The facts of one step, the same on all ranks.

    `weight`, `loss`, `stop` and `newly_moving` are sums over all ranks: the weights, the losses,
    how many ranks asked to stop, how many saw a buffer begin to move. Samples and losses are also
    given by rank.

    The other fields tell, by rank, how the step before went, in seconds: `busy` computing, `waited`
    for other ranks.
    `digests_by_rank` are digests of what a step overwrites (0: not taken), and
    `digesting_by_rank` the seconds that each took.
    """

    weight: float
    loss: float
    stop: float
    newly_moving: float
    samples_by_rank: tuple[int, ...]
    losses_by_rank: tuple[float, ...]
    busy_by_rank: tuple[float, ...] = ()
    waited_by_rank: tuple[float, ...] = ()
    digests_by_rank: tuple[float, ...] = ()
    digesting_by_rank: tuple[float, ...] = ()


class FactsMessage:
    """This rank's part of the facts: filled during the window, sent once, waited for once.

    With `slots`, weights and losses travel slot by slot, and are added along the tree of exact
    mode.
    """

    def __init__(self, group: Group, device: torch.device, slots: int = 0) -> None:
        self._group = group
        self._slots = slots
        self._on_cpu = device.type == "cpu"
        self._first_slot = _BY_RANK + _ROWS * group.size
        # by row, the index of this rank's number
        self._own = range(_BY_RANK + group.rank, self._first_slot, group.size)
        # a list if the host knows the numbers: a write to a tensor takes microseconds
        self._values: Any = [0.0] * self._first_slot + [ABSENT] * (2 * slots)
        if not self._on_cpu:
            self._values = torch.zeros(len(self._values), dtype=torch.float64, device=device)
            self._values[self._first_slot :].fill_(ABSENT)
        self.sent = False
        self._sum: Reading | None = None

    def add(self, weight: float | Tensor, loss: Tensor | float, slot: int = 0) -> None:
        """Count a micro-batch: its weight and its sum of losses. The loss is read at once, because
        the user may change it in place later.
        """
        assert not self.sent
        if self._on_cpu:
            weight = float(weight)
            loss = loss.item() if isinstance(loss, Tensor) else loss
        elif isinstance(loss, Tensor):
            loss = loss.detach()
        if self._slots:
            index = self._first_slot + slot
            self._put((index, weight), (index + self._slots, loss))
        self._values[_WEIGHT] += weight
        self._values[self._own[_LOSSES]] += loss

    def add_samples(self, count: int) -> None:
        self._values[self._own[_SAMPLES]] += count

    def add_times(self, busy: float, waited: float) -> None:
        """Add the times of this rank's step before, in seconds."""
        self._put((self._own[_BUSY], busy), (self._own[_WAITED], waited))

    def add_digest(self, digest: int, seconds: float) -> None:
        """Add a digest of what this rank began the step with, and the seconds that it took. The
        digest has 52 bits, so that float64 holds it exactly.
        """
        self._put((self._own[_DIGESTS], digest), (self._own[_DIGESTING], seconds))

    def _put(self, *values: tuple[int, float | Tensor]) -> None:
        """Set numbers of the message, given with their indices."""
        for index, value in values:
            if self._on_cpu:
                self._values[index] = value
            else:  # assigning a number copies it from the host, which waits for the GPU
                self._values[index].fill_(value)

    def send(self, *, stop: bool, newly_moving: bool) -> None:
        if stop:
            self._put((_STOP, 1))
        if newly_moving:
            self._put((_NEWLY_MOVING, 1))
        if self._on_cpu:
            self._values = torch.tensor(self._values, dtype=torch.float64)
        self.sent = True
        work = self._group.all_reduce(self._values, place="for the facts of a step")
        self._sum = Reading(self._values, work)

    def wait(self) -> Facts:
        assert self._sum is not None, "the facts leave before they are waited for"
        values = self._sum.list()
        size = self._group.size
        rows = []
        for first in range(_BY_RANK, self._first_slot, size):
            rows.append(tuple(values[first : first + size]))
        weight = values[_WEIGHT]
        loss = sum(rows[_LOSSES])
        if self._slots:
            by_slot = torch.tensor(values[self._first_slot :], dtype=torch.float64)
            weights, losses = by_slot.split(self._slots)
            weight = add_rows(weights).item()
            loss = add_rows(losses).item()
        return Facts(
            weight,
            loss,
            values[_STOP],
            values[_NEWLY_MOVING],
            samples_by_rank=tuple(map(int, rows[_SAMPLES])),
            losses_by_rank=rows[_LOSSES],
            busy_by_rank=rows[_BUSY],
            waited_by_rank=rows[_WAITED],
            digests_by_rank=rows[_DIGESTS],
            digesting_by_rank=rows[_DIGESTING],
        )


class Reading:
    """Numbers that travel from a device to the host. Only reading them waits.

    They are what `values` holds when the work queued so far is done. `values` must not change
    afterwards.

    On a GPU the numbers are copied to pinned memory behind that work. Only `list()` waits, and only
    for the copy: work queued later runs meanwhile. `work` is a collective under way on `values`:
    the copy waits for it, the current stream does not.
    """

    def __init__(self, values: Tensor, work: Work | None = None) -> None:
        self._values = values.detach()
        self._work = work
        self._copied: torch.cuda.Event | None = None
        if values.is_cuda:
            side = _side_stream(values.device)
            side.wait_stream(torch.cuda.current_stream(values.device))
            with torch.cuda.stream(side):
                if work is not None:
                    work.wait()
                self._copy()
            self._work = None

    def _copy(self) -> None:
        host = torch.empty(self._values.shape, dtype=self._values.dtype, pin_memory=True)
        host.copy_(self._values, non_blocking=True)
        self._values.record_stream(torch.cuda.current_stream(self._values.device))
        self._values = host
        self._copied = torch.cuda.Event()
        self._copied.record()

    def list(self) -> list[float]:
        """The numbers, flat."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        if self._copied is not None:
            self._copied.synchronize()
        numbers: list[float] = self._values.reshape(-1).tolist()
        return numbers


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
