"""A schedule run between processes, over point-to-point messages of the group's backend.

A large tensor is cut into lanes, which go through the schedule in parallel: while one lane's piece
is sent, another lane's is added. What arrives is added in the order of the schedule, so the bits do
not depend on timing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.collectives.cells import Cells, FlatCells
from lockstep.collectives.group import Group
from lockstep.collectives.work import wait_on_page
from lockstep.errors import PeerFailed
from lockstep.schedules.algorithms import schedule as schedule_of
from lockstep.schedules.schedule import Kind, Schedule, Transfer, spans

LANE = 2 * 2**20  # bytes; a message is cut into one lane for each LANE bytes
_MOST_LANES = 8
_TAGS = 1 << 20  # number of tags: all messages of one collective have the same tag

Steps = tuple[tuple[list[Transfer], list[Transfer]], ...]


@lru_cache(maxsize=256)
def plan(
    kind: Kind, algorithm: str, world: int, rank: int, root: int, ranks_per_node: int | None
) -> tuple[Schedule, Steps]:
    """Return the schedule, and what one rank sends and receives in each round."""
    schedule = schedule_of(kind, algorithm, world, root=root, ranks_per_node=ranks_per_node)
    return schedule, tuple(schedule.of_rank(rank))


def execute(
    group: Group, number: int, steps: Steps, lanes: Sequence[Cells], op: str = "sum"
) -> None:
    """Run one rank's part of a schedule, on every lane. `number` is the collective's number. Raises
    PeerFailed if another rank has gone.
    """
    if dist.get_backend(group.process_group) == "nccl":
        _execute_batched(group, steps, lanes, op)
        group.ended(number)
        return
    runs = [_Lane(group, number % _TAGS, cells, op) for cells in lanes]
    try:
        for lane in runs:
            lane.begin(steps)
        for _ in steps:
            for lane in runs:
                lane.step()
        for lane in runs:
            lane.end()
    except RuntimeError as error:
        group.look()  # raises PeerFailed with the dead rank, if this host knows it
        raise PeerFailed(
            "peer-left-collective",
            number=number,
            who="a rank",
            call=f"a collective of {group}",
            error=str(error).splitlines()[0],
        ) from error
    group.ended(number)


class _Lane:
    """One piece of the tensor on its way through the schedule."""

    def __init__(self, group: Group, tag: int, cells: Cells, op: str) -> None:
        self._group = group
        self._tag = tag
        self._cells = cells
        self._op = op
        # the sends in flight, each with the cells that must not change before it is done
        self._sends: list[tuple[dist.Work, frozenset[int]]] = []
        self._receives: list[tuple[Transfer, list[Tensor], list[dist.Work]]] = []

    def begin(self, steps: Steps) -> None:
        self._steps: Iterator[tuple[list[Transfer], list[Transfer]]] = iter(steps)
        self._post()

    def step(self) -> None:
        """Take what arrives in this round, then start the next."""
        for transfer, buffers, works in self._receives:
            for work in works:
                wait_on_page(work, self._group.timeout)
            if transfer.reduce:
                self._wait_for(transfer.cells)
                self._cells.combine(transfer.cells, buffers, self._op)
            else:
                self._cells.replace(transfer.cells, buffers)
        self._post()

    def end(self) -> None:
        for work, _ in self._sends:
            wait_on_page(work, self._group.timeout)

    def _post(self) -> None:
        self._receives = []
        sends, receives = next(self._steps, ([], []))
        sending: set[int] = set()
        for transfer in sends:
            sending.update(transfer.cells)
        for transfer in receives:
            buffers = self._cells.incoming(transfer.cells)
            # Content that replaces cells is received in place, unless this round also sends from
            # them.
            if transfer.reduce or not sending.isdisjoint(transfer.cells):
                buffers = [torch.empty_like(buffer) for buffer in buffers]
            else:
                self._wait_for(transfer.cells)
            works = [self._irecv(buffer, transfer.src) for buffer in buffers if buffer.numel()]
            self._receives.append((transfer, buffers, works))
        for transfer in sends:
            cells = frozenset(transfer.cells)
            for piece in self._cells.outgoing(transfer.cells):
                if piece.numel():
                    self._sends.append((self._isend(piece, transfer.dst), cells))

    def _wait_for(self, cells: Sequence[int]) -> None:
        """Return when no send of these cells is in flight any more."""
        remaining = []
        for work, sending in self._sends:
            if sending.isdisjoint(cells):
                remaining.append((work, sending))
            else:
                wait_on_page(work, self._group.timeout)
        self._sends = remaining

    def _isend(self, piece: Tensor, rank: int) -> dist.Work:
        size = piece.numel() * piece.element_size()
        # no call between the read and the write of the sum: other threads add to it too
        self._group.bytes_sent += size
        work = dist.isend(
            piece, dst=self._group.ranks[rank], group=self._group.process_group, tag=self._tag
        )
        assert work is not None
        return work

    def _irecv(self, buffer: Tensor, rank: int) -> dist.Work:
        work = dist.irecv(
            buffer, src=self._group.ranks[rank], group=self._group.process_group, tag=self._tag
        )
        assert work is not None
        return work


def _execute_batched(group: Group, steps: Steps, lanes: Sequence[Cells], op: str) -> None:
    """Run round by round, with all messages of a round in one launch, as NCCL needs it."""
    for sends, receives in steps:
        for cells in lanes:
            operations = []
            arrivals = []
            for transfer in receives:
                peer = group.ranks[transfer.src]
                buffers = [torch.empty_like(buffer) for buffer in cells.incoming(transfer.cells)]
                arrivals.append(buffers)
                for buffer in buffers:
                    operations.append(dist.P2POp(dist.irecv, buffer, peer, group.process_group))
            for transfer in sends:
                peer = group.ranks[transfer.dst]
                for piece in cells.outgoing(transfer.cells):
                    group.bytes_sent += piece.numel() * piece.element_size()
                    operations.append(dist.P2POp(dist.isend, piece, peer, group.process_group))
            operations = [operation for operation in operations if operation.tensor.numel()]
            if operations:
                for work in dist.batch_isend_irecv(operations):
                    wait_on_page(work)
            for transfer, buffers in zip(receives, arrivals, strict=True):
                if transfer.reduce:
                    cells.combine(transfer.cells, buffers, op)
                else:
                    cells.replace(transfer.cells, buffers)


def lanes_of(flat: Tensor, schedule: Schedule) -> list[Cells]:
    """Cut a flat tensor into lanes: one for each LANE bytes of the largest message, up to 8. The
    same on all ranks.
    """
    counts = [int(round_.count.max()) for round_ in schedule.rounds if len(round_)]
    largest = max(counts, default=1)
    message = flat.numel() * flat.element_size() * largest // schedule.cells
    lanes = min(_MOST_LANES, max(1, message // LANE))
    return [
        FlatCells.cut(flat[start:stop], schedule.cells)
        for start, stop in spans(flat.numel(), lanes)
    ]
