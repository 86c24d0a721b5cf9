"""The collectives by a schedule: one rank's part.

Each function takes the collective's number on the caller's thread, so that ranks compare their
calls in program order. It returns a function that runs the collective. That is called at once or,
with `async_op`, on the group's background thread, in the order of the calls. `label` names the
algorithm to the other ranks (" by ring") if the caller chose it, and is empty otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from lockstep.collectives.cells import FlatCells, LooseCells, cell_of, edges_of, working_copy
from lockstep.collectives.group import Group
from lockstep.collectives.over_processes import Steps, execute, lanes_of, plan
from lockstep.collectives.reduce_op import Op, check_op, check_rows, working_dtype
from lockstep.collectives.tensor_spec import (
    TensorSpec,
    arriving_forms,
    as_bytes,
    from_bytes,
    gathered_forms,
    scattered_forms,
)
from lockstep.schedules.schedule import Kind, Schedule

T = TypeVar("T")
Run = Callable[[], T]


def all_reduce(
    group: Group, tensor: Tensor, op: Op, algorithm: str, label: str, call_site: str | None = None
) -> Run[Tensor]:
    return _reduced(group, "all_reduce", tensor, op, algorithm, f"{op}{label}", 0, call_site)


def reduce(
    group: Group, tensor: Tensor, root: int, op: Op, algorithm: str, label: str
) -> Run[Tensor]:
    group.check_root(root)
    return _reduced(group, "reduce", tensor, op, algorithm, f"{op} to {root}{label}", root, None)


def _reduced(
    group: Group,
    kind: Kind,
    tensor: Tensor,
    op: Op,
    algorithm: str,
    detail: str,
    root: int,
    call_site: str | None,
) -> Run[Tensor]:
    check_op(op, tensor)
    schedule, steps = _plan(group, kind, algorithm, root)
    number = group.announce(kind, tensor, detail, call_site, sends=0)

    def run() -> Tensor:
        wanted = kind == "all_reduce" or group.rank == root
        in_place = wanted and working_dtype(tensor) == tensor.dtype and tensor.is_contiguous()
        flat = tensor.detach().view(-1) if in_place else working_copy(tensor)
        group.wait_for_all(number)
        if flat.numel():
            execute(group, number, steps, lanes_of(flat, schedule), op)
        if op == "mean" and wanted:
            flat.div_(group.size)
        if wanted and not in_place:
            with torch.no_grad():
                tensor.copy_(flat.view(tensor.shape))
        return tensor

    return run


def broadcast(group: Group, tensor: Tensor, root: int, algorithm: str, label: str) -> Run[Tensor]:
    group.check_root(root)
    schedule, steps = _plan(group, "broadcast", algorithm, root)
    number = group.announce("broadcast", tensor, f"from {root}{label}", None, sends=0)

    def run() -> Tensor:
        data = as_bytes(tensor)
        group.wait_for_all(number)
        if data.numel():
            execute(group, number, steps, lanes_of(data, schedule))
        if data.data_ptr() != tensor.data_ptr():
            with torch.no_grad():
                tensor.copy_(from_bytes(data, TensorSpec.of(tensor)))
        return tensor

    return run


def reduce_scatter(group: Group, tensor: Tensor, op: Op, algorithm: str, label: str) -> Run[Tensor]:
    check_op(op, tensor)
    check_rows(tensor)
    _, steps = _plan(group, "reduce_scatter", algorithm)
    number = group.announce("reduce_scatter", tensor, f"{op}{label}", None, sends=0)

    def run() -> Tensor:
        parts = tensor.detach().tensor_split(group.size)
        edges = edges_of([part.numel() for part in parts])
        flat = working_copy(tensor)
        group.wait_for_all(number)
        execute(group, number, steps, [FlatCells(flat, edges)], op)
        local = cell_of(flat, edges, group.rank).clone()
        if op == "mean":
            local.div_(group.size)
        return local.to(tensor.dtype).view(parts[group.rank].shape)

    return run


def all_gather(group: Group, tensor: Tensor, algorithm: str, label: str) -> Run[list[Tensor]]:
    _, steps = _plan(group, "all_gather", algorithm)
    forms = gathered_forms(group, "all_gather", tensor)
    number = group.announce("all_gather", as_bytes(tensor)[:0], label.strip(), None, sends=0)

    def run() -> list[Tensor]:
        sizes = [form.bytes for form in forms]
        edges = edges_of(sizes)
        local = as_bytes(tensor)
        data = local.new_empty(edges[-1])
        cell_of(data, edges, group.rank).copy_(local)
        group.wait_for_all(number)
        execute(group, number, steps, [FlatCells(data, edges)])
        pieces = data.split(sizes)
        if len(set(sizes)) > 1:
            # after a piece of another length, a piece may be misaligned for its dtype
            pieces = [piece.clone() for piece in pieces]
        return list(map(from_bytes, pieces, forms))

    return run


def all_gather_slices(
    group: Group, flat: Tensor, slices: Sequence[range], call_site: str
) -> Run[None]:
    """Fill the other ranks' slices of a flat tensor in place, by doubling. `slices` tile the
    tensor.
    """
    _, steps = _plan(group, "all_gather", "doubling")
    edges = [*(part.start for part in slices), flat.numel()]
    number = group.announce("all_gather", flat, "of slices", call_site, sends=0)

    def run() -> None:
        group.wait_for_all(number)
        execute(group, number, steps, [FlatCells(flat, edges)])

    return run


def gather(
    group: Group, tensor: Tensor, root: int, algorithm: str, label: str
) -> Run[list[Tensor] | None]:
    group.check_root(root)
    forms = gathered_forms(group, "gather", tensor)
    data = as_bytes(tensor)
    cells = LooseCells({group.rank: data}, [form.bytes for form in forms], data[:0])
    wanted = list(enumerate(forms)) if group.rank == root else []
    run = _moved(group, "gather", algorithm, f"to {root}{label}", root, cells, wanted)
    return lambda: run() or None


def scatter(
    group: Group, tensors: Sequence[Tensor] | None, root: int, algorithm: str, label: str
) -> Run[Tensor]:
    forms, like = scattered_forms(group, tensors, root)
    data = {rank: as_bytes(tensor) for rank, tensor in enumerate(tensors or ())}
    cells = LooseCells(data, [form.bytes for form in forms], like)
    wanted = [(group.rank, forms[group.rank])]
    run = _moved(group, "scatter", algorithm, f"from {root}{label}", root, cells, wanted)
    return lambda: run()[0]


def all_to_all(
    group: Group, tensors: Sequence[Tensor], algorithm: str, label: str
) -> Run[list[Tensor]]:
    arriving = arriving_forms(group, tensors)
    size = group.size
    rank = group.rank
    sizes = [0] * size * size  # bytes of the cells that this rank sends or receives
    outgoing = {}
    wanted = []
    for other, form in enumerate(arriving):
        data = as_bytes(tensors[other])
        outgoing[rank * size + other] = data
        wanted.append((other * size + rank, form))
        sizes[rank * size + other] = data.numel()
        sizes[other * size + rank] = form.bytes
    cells = LooseCells(outgoing, sizes, outgoing[rank * size][:0])
    return _moved(group, "all_to_all", algorithm, label.strip(), 0, cells, wanted)


def _moved(
    group: Group,
    kind: Kind,
    algorithm: str,
    detail: str,
    root: int,
    cells: LooseCells,
    wanted: Sequence[tuple[int, TensorSpec]],
) -> Run[list[Tensor]]:
    """Return a function that moves cells, which are separate tensors, and returns the `wanted`
    ones.
    """
    _, steps = _plan(group, kind, algorithm, root)
    number = group.announce(kind, cells.like, detail, None, sends=0)

    def run() -> list[Tensor]:
        group.wait_for_all(number)
        execute(group, number, steps, [cells])
        return [from_bytes(cells.tensors[cell].clone(), form) for cell, form in wanted]

    return run


def _plan(group: Group, kind: Kind, algorithm: str, root: int = 0) -> tuple[Schedule, Steps]:
    nodes = group.ranks_per_node if algorithm == "hierarchical" else None
    return plan(kind, algorithm, group.size, group.rank, root, nodes)
