"""Grader 5: on real ranks, against one process that has the samples of all ranks."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import torch
from grading import check, close, on_ranks
from torch import Tensor, nn
from torch.nn import functional as F

from lockstep import World, collectives

COUNTS = [(4, 4, 4), (5, 2, 1), (6, 0, 1)]
"""How many samples each rank has."""
Found = list[tuple[list[Tensor | None], int]]


class Net(nn.Module):
    """Two heads. Only a rank that is told to uses the second; nobody uses the third."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(3, 4)
        self.heads = nn.ModuleList(nn.Linear(4, 2) for _ in range(3))

    def summed_loss(self, x: Tensor, y: Tensor, head: int) -> Tensor:
        logits = self.heads[head](self.body(x).tanh())
        return F.cross_entropy(logits, y, reduction="sum")


def grade(lesson: ModuleType) -> None:
    for rank, found in enumerate(on_ranks(averaged, 3, lesson.average_gradients)):
        for counts, (gradients, calls) in zip(COUNTS, found, strict=True):
            check_one(rank, counts, gradients, calls)


def samples(counts: tuple[int, ...], rank: int) -> tuple[Tensor, Tensor, int]:
    """This rank's own, and the head that it uses."""
    before = sum(counts[:rank])
    x = torch.randn(sum(counts), 3, generator=torch.Generator().manual_seed(1))
    mine = slice(before, before + counts[rank])
    return x[mine], (x[mine, 0] > 0).long(), rank % 2


def averaged(world: World, average_gradients: Callable[..., None]) -> Found:
    """On a rank: for each split its gradients, and how often it called all-reduce."""
    results: Found = []
    for counts in COUNTS:
        model, calls = Net(), [0]

        def all_reduce(tensor: Tensor, calls: list[int] = calls) -> None:
            calls[0] += 1
            collectives.all_reduce(tensor)

        x, y, head = samples(counts, world.rank)
        if len(x):
            model.summed_loss(x, y, head).backward()
        average_gradients(list(model.parameters()), len(x), all_reduce)
        results.append(([each.grad for each in model.parameters()], calls[0]))
    return results


def alone(counts: tuple[int, ...], divisors: tuple[int, ...] = (1, 1, 1)) -> dict[str, Tensor]:
    """The sums of all ranks' gradients, in one process. Each rank's is divided by its divisor."""
    model = Net()
    for rank, count in enumerate(counts):
        if count:
            (model.summed_loss(*samples(counts, rank)) / divisors[rank]).backward()
    return {
        name: torch.zeros_like(each) if each.grad is None else each.grad
        for name, each in model.named_parameters()
    }


def check_one(
    rank: int, counts: tuple[int, ...], gradients: list[Tensor | None], calls: int
) -> None:
    case = f"With {counts} samples on the ranks rank {rank}"
    check(calls == 1, f"{case} called all_reduce {calls} times. Call it once.")
    sums, total = alone(counts), sum(counts)
    means = alone(counts, divisors=counts)
    wrongs = {
        "the sum over all samples. Divide by their number": 1.0,
        f"the sum divided by {len(counts)}, the number of ranks. Divide by the number of samples "
        "of all ranks": 1 / len(counts),
        "the sum divided by this rank's own number of samples": 1 / max(counts[rank], 1),
    }
    for found, (name, summed) in zip(gradients, sums.items(), strict=True):
        check(found is not None, f"{case} ended with .grad = None for {name}.")
        right = close(found, summed / total)
        for what, factor in wrongs.items():
            check(
                right or not close(found, summed * factor),
                f"{case} has for {name} {what}.",
            )
        check(
            right or not close(found, means[name] / len(counts)),
            f"{case} has for {name} the mean of the ranks' means. A rank with fewer samples must "
            "count less: add up the sums, and divide once by the samples of all ranks.",
        )
        check(right, f"{case} has another gradient for {name} than one process with all samples.")
