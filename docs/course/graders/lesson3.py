"""Grader 3: on real ranks, against plain addition; what is sent is counted."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import torch
import torch.distributed as dist
from grading import check, on_ranks
from torch import Tensor

from lockstep import World

LENGTHS = (12, 7, 1)
Sums = list[tuple[Tensor, list[int]]]


def grade(lesson: ModuleType) -> None:
    for size in (1, 2, 4, 3):
        for rank, sums in enumerate(on_ranks(summed, size, lesson.ring_all_reduce)):
            for length, (found, sent) in zip(LENGTHS, sums, strict=True):
                check_one(rank, size, length, found, sent)


def row(rank: int, length: int) -> Tensor:
    """Each sum shows which ranks are in it, and how often."""
    return torch.arange(length) + 1000 * 10**rank


def summed(world: World, ring_all_reduce: Callable[..., None]) -> Sums:
    """On a rank: for each length its result, and how many elements each message had."""
    results = []
    for length in LENGTHS:
        tensor, sent = row(world.rank, length), []

        def pass_on(cell: Tensor, sent: list[int] = sent) -> Tensor:
            sent.append(cell.numel())
            return exchange(world, cell)

        ring_all_reduce(tensor, world.rank, world.size, pass_on)
        results.append((tensor, sent))
    return results


def exchange(world: World, cell: Tensor) -> Tensor:
    """Send the cell to the right, and return what comes from the left: its length first."""
    if world.size == 1:
        return cell.clone()
    length = torch.empty(1, dtype=torch.int64)
    swap(world, torch.tensor([cell.numel()]), length)
    received = torch.empty(int(length), dtype=cell.dtype)
    swap(world, cell.contiguous(), received)
    return received


def swap(world: World, outgoing: Tensor, incoming: Tensor) -> None:
    sending = dist.isend(outgoing, (world.rank + 1) % world.size)
    dist.recv(incoming, (world.rank - 1) % world.size)
    sending.wait()


def check_one(rank: int, size: int, length: int, found: Tensor, sent: list[int]) -> None:
    case = f"With {size} ranks and {length} elements rank {rank}"
    check(
        len(sent) == 2 * (size - 1),
        f"{case} sent {len(sent)} messages. A ring sends 2(N - 1) = {2 * (size - 1)}: N - 1 to add "
        "up the cells (reduce-scatter), and N - 1 to pass on the complete ones (all-gather).",
    )
    expected = torch.stack([row(each, length) for each in range(size)]).sum(0)
    check(
        torch.equal(found, expected),
        f"{case} ended with {found.tolist()}. The sum is {expected.tolist()}.",
    )
    most = -(-length // size)
    check(
        max(sent, default=0) <= most,
        f"{case} sent a message of {max(sent, default=0)} elements. A cell has at most {most}.",
    )
