"""Grader 9: what is sent and what is owed add up; replicas are those of a loop in one process."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from grading import check, close, on_ranks
from torch import Tensor

import lockstep

WORKERS, LR = 3, 0.1


def grade(lesson: ModuleType) -> None:
    for shape, share, kept in [((10,), 0.3, 3), ((4, 6), 0.25, 6), ((5,), 0.01, 1)]:
        check_top_k(lesson, shape, share, kept)
    for steps, every in [(6, 1), (6, 2), (7, 3), (2, 5)]:
        check_local_steps(lesson, steps, every)


def check_top_k(lesson: ModuleType, shape: tuple[int, ...], share: float, kept: int) -> None:
    random = torch.Generator().manual_seed(0)
    top_k, case = lesson.TopK(share), f"TopK({share}) with shape {shape}"
    gradients, results = torch.zeros(shape), torch.zeros(shape)
    for call in range(1, 6):
        gradient = torch.randn(shape, generator=random)
        given, owed = gradient.clone(), gradients - results
        sent = top_k.compress(gradient)
        check(torch.equal(gradient, given), f"{case} has changed the gradient that it was given.")
        check(sent.shape == gradient.shape, f"{case} returned the shape {tuple(sent.shape)}.")
        count = int((sent != 0).sum())
        check(count == kept, f"{case} sent {count} elements in call {call}, not {kept}.")
        total = (gradient + owed).flatten()
        places = total.abs().topk(kept).indices
        check(
            bool((sent.flatten()[places] != 0).all()),
            f"{case}: in call {call} these are not the largest elements of the gradient and what "
            "is owed.",
        )
        check(
            close(sent.flatten()[places], total[places]),
            f"{case}: in call {call} the sent elements are not gradient plus what is owed. What is "
            "not sent must be added to the next gradient, once.",
        )
        gradients, results = gradients + gradient, results + sent


def target(rank: int) -> Tensor:
    """Where the samples of a rank pull the weights."""
    return torch.tensor([1.0 + rank, -2.0 * rank, 0.5])


def slope(rank: int, weights: Tensor) -> Tensor:
    return (1 + rank) * (weights - target(rank))


def check_local_steps(lesson: ModuleType, steps: int, every: int) -> None:
    replicas = [torch.ones(3) for _ in range(WORKERS)]
    for step in range(1, steps + 1):
        replicas = [each - LR * slope(rank, each) for rank, each in enumerate(replicas)]
        if step % every == 0 or step == steps:
            replicas = [torch.stack(replicas).mean(0)] * WORKERS
    found = on_ranks(on_a_rank, WORKERS, lesson.local_steps, steps, every)
    case = f"local_steps with steps={steps}, every={every}"
    for rank, (weights, unchanged, calls) in enumerate(found):
        check(unchanged, f"{case} has changed the weights that it was given.")
        check(torch.equal(weights, found[0][0]), f"{case}: ranks 0 and {rank} have other weights.")
        check(close(weights, replicas[0]), f"{case} gave {weights}, not {replicas[0]}.")
        check(
            calls <= -(-steps // every),
            f"{case} communicated {calls} times, and {-(-steps // every)} times are enough.",
        )


def on_a_rank(
    world: lockstep.World, solve: Any, steps: int, every: int
) -> tuple[Tensor, bool, int]:
    original, calls = dist.all_reduce, 0

    def counted(*arguments: Any, **keywords: Any) -> Any:
        nonlocal calls
        calls += 1
        return original(*arguments, **keywords)

    start = torch.ones(3)
    dist.all_reduce = counted
    try:
        weights = solve(start, lambda now: slope(world.rank, now), steps, every, LR)
    finally:
        dist.all_reduce = original
    return weights, torch.equal(start, torch.ones(3)), calls
