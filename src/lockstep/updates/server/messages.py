"""What rank 0 and another rank send to each other: a header of float64 numbers, in which integers
below 2^53 are exact, and flat tensors whose sizes both know.

It uses neither torch RPC (deprecated, and it unpickles what arrives) nor pickle.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from threading import Lock

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.collectives.group import Group
from lockstep.data.window_loader import EpochCourse
from lockstep.errors import PeerFailed
from lockstep.gradients.reducer import Reducer
from lockstep.updates.update import AppliedWindow

NEXT, PUSH, BYE = range(3)
"""Kinds of messages to rank 0, which answers NEXT only."""
_HEADER = 8  # numbers in a header
_counting = Lock()  # for the threads that count in one group


@dataclass(frozen=True, slots=True)
class Messages:
    """Messages to and from one other rank, the `peer`. Raises PeerFailed if it has ended, or gives
    no answer for `timeout`.
    """

    process_group: dist.ProcessGroup
    everyone: Group
    peer: int
    timeout: timedelta

    def send(self, header: Sequence[float], tensors: Sequence[Tensor] = ()) -> None:
        packed = torch.zeros(_HEADER, dtype=torch.float64)
        packed[: len(header)] = torch.tensor(header, dtype=torch.float64)
        with _counting:
            self.everyone.bytes_sent += sum(tensor.nbytes for tensor in (packed, *tensors))
        self._transfer(self.process_group.send, (packed, *tensors))

    def header(self) -> list[float]:
        header = torch.zeros(_HEADER, dtype=torch.float64)
        self.receive([header])
        return header.tolist()

    def receive(self, tensors: Sequence[Tensor]) -> None:
        """Receive the tensors that follow a header."""
        self._transfer(self.process_group.recv, tensors)

    def _transfer(self, start: Callable[..., dist.Work], tensors: Sequence[Tensor]) -> None:
        try:
            for work in [start([tensor], self.peer, 0) for tensor in tensors]:
                work.wait(self.timeout)
        except RuntimeError as error:
            raise PeerFailed("peer-gone", rank=self.peer, why=str(error)) from error


@dataclass(frozen=True, slots=True)
class RemoteServer:
    """The server (server.py) as the other ranks reach it."""

    messages: Messages
    reducer: Reducer

    def next(self, rank: int, course: EpochCourse) -> tuple[list[float], list[Tensor]]:
        self.messages.send([NEXT, *course])
        header = self.messages.header()
        plans = self.reducer.layout.buckets
        flats = [torch.empty(plan.numel, dtype=plan.dtype) for plan in plans]
        self.messages.receive(flats)
        return header, flats

    def push(self, rank: int, facts: Sequence[float], gradients: Sequence[Tensor]) -> None:
        self.messages.send([PUSH, *facts], gradients)

    def synchronize_before(self, step: int) -> None:
        """Do nothing: rank 0 does it."""

    def applied(self) -> tuple[AppliedWindow, ...]:
        """Return nothing: rank 0 has them."""
        return ()

    def close(self) -> None:
        self.messages.send([BYE])
