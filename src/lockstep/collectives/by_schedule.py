"""The collectives by a schedule, on one rank.

Each function takes a collective's number on the caller's thread, so that ranks compare what they
are about to do in the order of the program, and returns what does it: at once or, for an
asynchronous call, in the group's background, in the order in which they were issued. `label` names
the algorithm to the other ranks where the caller chose it (" by ring"), and is empty where it
follows from the size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from lockstep.collectives.cells import FlatCells, LooseCells, edges_of
from lockstep.collectives.forms import Form, as_bytes, check_alike, exchange, from_bytes
from lockstep.collectives.group import Group, Op, check_op, working_dtype
from lockstep.collectives.native import arriving_forms, scattered_forms
from lockstep.collectives.over_processes import execute, lanes_of, plan
from lockstep.collectives.schedule import Kind
from lockstep.errors import UsageError

T = TypeVar("T")
Run = Callable[[], T]


def all_reduce(
    group: Group,
    tensor: Tensor,
    op: Op,
    algorithm: str,
    label: str,
    ranks_per_node: int | None = None,
    place: str | None = None,
) -> Run[Tensor]:
    return _reduced(group, "all_reduce", tensor, op, algorithm, label, 0, ranks_per_node, place)


def reduce(
    group: Group, tensor: Tensor, root: int, op: Op, algorithm: str, label: str
) -> Run[Tensor]:
    group.check_root(root)
    return _reduced(group, "reduce", tensor, op, algorithm, label, root, None)


def _reduced(
    group: Group,
    kind: Kind,
    tensor: Tensor,
    op: Op,
    algorithm: str,
    label: str,
    root: int,
    ranks_per_node: int | None,
    place: str | None = None,
) -> Run[Tensor]:
    check_op(op, tensor)
    schedule, steps = plan(kind, algorithm, group.size, group.rank, root, ranks_per_node)
    number = group.announce(
        kind, tensor, f"{op}{f' to {root}' if kind == 'reduce' else ''}{label}", place, sends=0
    )

    def run() -> Tensor:
        wanted = kind == "all_reduce" or group.rank == root
        working = working_dtype(tensor)
        in_place = wanted and working == tensor.dtype and tensor.is_contiguous()
        flat = (
            tensor.detach().view(-1)
            if in_place
            else tensor.detach().reshape(-1).to(working, copy=True)
        )
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
    schedule, steps = plan("broadcast", algorithm, group.size, group.rank, root, None)
    number = group.announce("broadcast", tensor, f"from {root}{label}", None, sends=0)

    def run() -> Tensor:
        octets = as_bytes(tensor)
        group.wait_for_all(number)
        if octets.numel():
            execute(group, number, steps, lanes_of(octets, schedule))
        if octets.data_ptr() != tensor.data_ptr():
            with torch.no_grad():
                tensor.copy_(from_bytes(octets, Form.of(tensor)))
        return tensor

    return run


def reduce_scatter(group: Group, tensor: Tensor, op: Op, algorithm: str, label: str) -> Run[Tensor]:
    check_op(op, tensor)
    if tensor.dim() == 0:
        raise UsageError("reduce_scatter cuts rows, and a 0-d tensor has none: use all_reduce")
    _, steps = plan("reduce_scatter", algorithm, group.size, group.rank, 0, None)
    number = group.announce("reduce_scatter", tensor, f"{op}{label}", None, sends=0)

    def run() -> Tensor:
        parts = tensor.detach().tensor_split(group.size)
        edges = edges_of([part.numel() for part in parts])
        flat = tensor.detach().reshape(-1).to(working_dtype(tensor), copy=True)
        group.wait_for_all(number)
        execute(group, number, steps, [FlatCells(flat, edges)], op)
        mine = flat[edges[group.rank] : edges[group.rank + 1]].clone()
        return (
            (mine.div_(group.size) if op == "mean" else mine)
            .to(tensor.dtype)
            .view(parts[group.rank].shape)
        )

    return run


def all_gather(group: Group, tensor: Tensor, algorithm: str, label: str) -> Run[list[Tensor]]:
    _, steps = plan("all_gather", algorithm, group.size, group.rank, 0, None)
    forms, number = _gathered_forms(group, "all_gather", tensor, label.strip())

    def run() -> list[Tensor]:
        sizes = [form.bytes for form in forms]
        edges = edges_of(sizes)
        octets = as_bytes(tensor).new_empty(edges[-1])
        octets[edges[group.rank] : edges[group.rank + 1]] = as_bytes(tensor)
        group.wait_for_all(number)
        execute(group, number, steps, [FlatCells(octets, edges)])
        return [
            from_bytes(piece, form)
            for piece, form in zip(_apart(octets, sizes), forms, strict=True)
        ]

    return run


def gather(
    group: Group, tensor: Tensor, root: int, algorithm: str, label: str
) -> Run[list[Tensor] | None]:
    group.check_root(root)
    _, steps = plan("gather", algorithm, group.size, group.rank, root, None)
    forms, number = _gathered_forms(group, "gather", tensor, f"to {root}{label}")

    def run() -> list[Tensor] | None:
        mine = as_bytes(tensor)
        cells = LooseCells({group.rank: mine}, [form.bytes for form in forms], mine)
        group.wait_for_all(number)
        execute(group, number, steps, [cells])
        return (
            [from_bytes(cells.held[rank].clone(), form) for rank, form in enumerate(forms)]
            if group.rank == root
            else None
        )

    return run


def scatter(
    group: Group,
    tensors: Sequence[Tensor] | None,
    root: int,
    device: torch.device,
    algorithm: str,
    label: str,
) -> Run[Tensor]:
    _, steps = plan("scatter", algorithm, group.size, group.rank, root, None)
    forms = scattered_forms(group, tensors, root)
    like = torch.empty(0, dtype=torch.uint8, device=device)
    number = group.announce("scatter", like, f"from {root}{label}", None, sends=0)

    def run() -> Tensor:
        held = (
            {} if tensors is None else {rank: as_bytes(each) for rank, each in enumerate(tensors)}
        )
        cells = LooseCells(held, [form.bytes for form in forms], like)
        group.wait_for_all(number)
        execute(group, number, steps, [cells])
        return from_bytes(cells.held[group.rank].clone(), forms[group.rank])

    return run


def all_to_all(
    group: Group, tensors: Sequence[Tensor], algorithm: str, label: str
) -> Run[list[Tensor]]:
    _, steps = plan("all_to_all", algorithm, group.size, group.rank, 0, None)
    arriving = arriving_forms(group, tensors)
    like = as_bytes(tensors[0])[:0]
    number = group.announce("all_to_all", like, label.strip(), None, sends=0)

    def run() -> list[Tensor]:
        size, rank = group.size, group.rank
        sizes = [0] * size * size  # of the cells that pass through here
        held = {}
        for other in range(size):
            held[rank * size + other] = as_bytes(tensors[other])
            sizes[rank * size + other] = held[rank * size + other].numel()
            sizes[other * size + rank] = arriving[other].bytes
        cells = LooseCells(held, sizes, like)
        group.wait_for_all(number)
        execute(group, number, steps, [cells])
        return [
            from_bytes(cells.held[src * size + rank].clone(), form)
            for src, form in enumerate(arriving)
        ]

    return run


def _gathered_forms(
    group: Group, kind: Kind, tensor: Tensor, detail: str
) -> tuple[Sequence[Form], int]:
    (forms,) = zip(*exchange(group, [Form.of(tensor)], kind), strict=True)
    check_alike(kind, forms, group)
    number = group.announce(kind, as_bytes(tensor)[:0], detail, None, sends=0)
    return forms, number


def _apart(octets: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """The pieces: views where all are alike, else copies, because behind one of another length a
    piece may lie askew for its dtype.
    """
    pieces = list(octets.split(list(sizes)))
    return pieces if len(set(sizes)) == 1 else [piece.clone() for piece in pieces]
