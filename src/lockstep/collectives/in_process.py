"""Schedules run over a list of tensors in one process, one tensor for each rank: to teach, to test,
and to use several devices of one process.

The transfers and their order are the same as between processes, so the bits are the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lockstep.collectives.cells import (
    Cells,
    FlatCells,
    LooseCells,
    cell_of,
    edges_of,
    working_copy,
)
from lockstep.collectives.reduce_op import check_op, check_rows
from lockstep.collectives.tensor_spec import TensorSpec, check_pieces
from lockstep.errors import UsageError
from lockstep.schedules.algorithms import schedule as schedule_of
from lockstep.schedules.schedule import Kind, Schedule, held_before, wanted_after


@torch.no_grad()
def execute(schedule: Schedule, cells: Sequence[Cells], op: str = "sum") -> None:
    """Run a schedule in place: `cells[r]` are rank r's cells. A mean is not divided here.

    Args:
        schedule: what is sent when.
        cells: the cells of each rank, by rank.
        op: sum, mean, max, min or prod.
    """
    for transfers in schedule.transfers():
        # Every transfer reads what its sender held before the round.
        sent = []
        for transfer in transfers:
            outgoing = cells[transfer.src].outgoing(transfer.cells)
            sent.append([part.clone() for part in outgoing])
        for transfer, parts in zip(transfers, sent, strict=True):
            receiver = cells[transfer.dst]
            pairs = zip(receiver.incoming(transfer.cells), parts, strict=True)
            if transfer.reduce:
                arrived = [part.to(buffer.device) for buffer, part in pairs]
                receiver.combine(transfer.cells, arrived, op)
            else:
                arrived = [buffer.copy_(part) for buffer, part in pairs]
                receiver.replace(transfer.cells, arrived)


@torch.no_grad()
def all_reduce(
    tensors: Sequence[Tensor],
    op: str = "sum",
    algorithm: str = "ring",
    *,
    ranks_per_node: int | None = None,
) -> list[Tensor]:
    """Replace every tensor by the sum (mean, max, min, prod) of all, and return them. They may be
    on different devices.

    Args:
        tensors: one tensor of each rank, by rank.
        op: sum, mean, max, min or prod.
        algorithm: a name of `algorithms_of`.
        ranks_per_node: ranks that share a node, for "hierarchical".

    Raises UsageError for tensors of different shapes or dtypes, an unknown operation or algorithm,
    and a mean of integers.
    """
    return _reduced("all_reduce", tensors, op, algorithm, ranks_per_node=ranks_per_node)


@torch.no_grad()
def reduce(
    tensors: Sequence[Tensor], root: int = 0, op: str = "sum", algorithm: str = "tree"
) -> list[Tensor]:
    """Replace tensor `root` by the sum of all, and return all. The others are not changed.

    Args:
        tensors: one tensor of each rank, by rank.
        root: the rank that has, or gets, the tensor.
        op: sum, mean, max, min or prod.
        algorithm: a name of `algorithms_of`.
    """
    return _reduced("reduce", tensors, op, algorithm, root=root)


def _reduced(
    kind: Kind,
    tensors: Sequence[Tensor],
    op: str,
    algorithm: str,
    *,
    root: int = 0,
    ranks_per_node: int | None = None,
) -> list[Tensor]:
    _check_alike(tensors)
    check_op(op, tensors[0])
    schedule = schedule_of(kind, algorithm, len(tensors), root=root, ranks_per_node=ranks_per_node)
    flats = [working_copy(tensor) for tensor in tensors]
    execute(schedule, [FlatCells.cut(flat, schedule.cells) for flat in flats], op)
    for rank, (tensor, flat) in enumerate(zip(tensors, flats, strict=True)):
        if kind == "all_reduce" or rank == root:
            if op == "mean":
                flat.div_(len(tensors))
            tensor.copy_(flat.view(tensor.shape))
    return list(tensors)


@torch.no_grad()
def broadcast(tensors: Sequence[Tensor], root: int = 0, algorithm: str = "tree") -> list[Tensor]:
    """Replace every tensor by tensor `root`, and return them.

    Args:
        tensors: one tensor of each rank, by rank.
        root: the rank that has, or gets, the tensor.
        algorithm: a name of `algorithms_of`.
    """
    _check_alike(tensors)
    schedule = schedule_of("broadcast", algorithm, len(tensors), root=root)
    flats = [tensor.detach().reshape(-1).clone() for tensor in tensors]
    execute(schedule, [FlatCells.cut(flat, schedule.cells) for flat in flats])
    for tensor, flat in zip(tensors, flats, strict=True):
        tensor.copy_(flat.view(tensor.shape))
    return list(tensors)


@torch.no_grad()
def reduce_scatter(
    tensors: Sequence[Tensor], op: str = "sum", algorithm: str = "ring"
) -> list[Tensor]:
    """Return each rank's rows of the sum of all, by rank. Rows are cut as `torch.tensor_split` cuts
    them.

    Args:
        tensors: one tensor of each rank, by rank.
        op: sum, mean, max, min or prod.
        algorithm: a name of `algorithms_of`.
    """
    _check_alike(tensors)
    first = tensors[0]
    check_op(op, first)
    check_rows(first)
    size = len(tensors)
    schedule = schedule_of("reduce_scatter", algorithm, size)
    parts = first.tensor_split(size)
    edges = edges_of([part.numel() for part in parts])
    flats = [working_copy(tensor) for tensor in tensors]
    execute(schedule, [FlatCells(flat, edges) for flat in flats], op)
    results = []
    for rank, flat in enumerate(flats):
        part = cell_of(flat, edges, rank).view(parts[rank].shape)
        if op == "mean":
            part = part / size
        results.append(part.to(first.dtype))
    return results


def all_gather(tensors: Sequence[Tensor], algorithm: str = "ring") -> list[list[Tensor]]:
    """Return what every rank has at the end: all tensors. The length of dim 0 may differ.

    Args:
        tensors: one tensor of each rank, by rank.
        algorithm: a name of `algorithms_of`.
    """
    return _moved("all_gather", tensors, len(tensors), algorithm)


def scatter(tensors: Sequence[Tensor], root: int = 0, algorithm: str = "tree") -> list[Tensor]:
    """Return what every rank has at the end: its tensor of the root's list.

    Args:
        tensors: the root's list: a tensor for each rank.
        root: the rank that has, or gets, the tensor.
        algorithm: a name of `algorithms_of`.
    """
    return [received for (received,) in _moved("scatter", tensors, len(tensors), algorithm, root)]


def gather(tensors: Sequence[Tensor], root: int = 0, algorithm: str = "tree") -> list[Tensor]:
    """Return what the root has at the end: every rank's tensor.

    Args:
        tensors: one tensor of each rank, by rank.
        root: the rank that has, or gets, the tensor.
        algorithm: a name of `algorithms_of`.
    """
    return _moved("gather", tensors, len(tensors), algorithm, root)[root]


def all_to_all(
    tensors: Sequence[Sequence[Tensor]], algorithm: str = "direct"
) -> list[list[Tensor]]:
    """Return what every rank has at the end: one tensor from each rank. `tensors[s][d]` goes from s
    to d.

    Args:
        tensors: a tensor for each rank, by sender.
        algorithm: a name of `algorithms_of`.
    """
    size = len(tensors)
    pieces: list[Tensor] = []
    for row in tensors:
        check_pieces("all_to_all", row, size)
        pieces += row
    return _moved("all_to_all", pieces, size, algorithm)


@torch.no_grad()
def _moved(
    kind: Kind, pieces: Sequence[Tensor], size: int, algorithm: str, root: int = 0
) -> list[list[Tensor]]:
    """Return what each of `size` ranks has at the end. `pieces` are the cells of all ranks."""
    _check_any(pieces)
    check_pieces(kind, pieces, len(pieces))
    schedule = schedule_of(kind, algorithm, size, root=root)
    flats = [piece.detach().reshape(-1) for piece in pieces]
    sizes = [flat.numel() for flat in flats]
    cells = []
    for rank in range(size):
        before = held_before(kind, size, rank, root, len(pieces))
        like = flats[before[0]] if before else flats[0]
        cells.append(LooseCells({cell: flats[cell].clone() for cell in before}, sizes, like))
    execute(schedule, cells)
    results = []
    for rank, local in enumerate(cells):
        after = wanted_after(kind, size, rank, root, len(pieces))
        results.append([local.tensors[cell].view(pieces[cell].shape) for cell in after])
    return results


def _check_alike(tensors: Sequence[Tensor]) -> None:
    _check_any(tensors)
    forms = [TensorSpec.of(tensor) for tensor in tensors]
    for rank, form in enumerate(forms):
        if form != forms[0]:
            raise UsageError("tensors-not-alike", first=str(forms[0]), rank=rank, form=str(form))


def _check_any(tensors: Sequence[Tensor]) -> None:
    if not tensors:
        raise UsageError("no-ranks")
