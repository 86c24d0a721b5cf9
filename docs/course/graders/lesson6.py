"""Grader 6: against one forward and backward pass over the samples of all ranks."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from grading import check, check_alike, check_call, close, on_ranks, replaced
from torch import Tensor, nn
from torch.nn import functional as F

import lockstep

SIZES = ((4, 4, 1), (2,), ())
"""Samples of the micro-batches of each rank."""
SAMPLES = sum(map(sum, SIZES))


def grade(lesson: ModuleType) -> None:
    inputs, labels = samples()
    whole = model()
    F.cross_entropy(whole(inputs), labels).backward()
    found = on_ranks(gradients_of_a_rank, len(SIZES), lesson.global_gradient)
    for rank, (gradients, sent) in enumerate(found):
        check_rank(f"On rank {rank} of {len(SIZES)}", gradients, whole)
        numbers = sum(parameter.numel() for parameter in whole.parameters())
        check(
            sent <= numbers + 8,
            f"Rank {rank} gave {sent} numbers to collectives. The model has {numbers} parameters, "
            "and each is to travel once.",
        )


def check_rank(case: str, found: list[Tensor | None], whole: nn.Module) -> None:
    wrong = [parameter.grad * SAMPLES for parameter in whole.parameters()]
    for (name, _), one in zip(whole.named_parameters(), found, strict=True):
        check(one is not None, f"{case} the parameter {name} has no gradient.")
    check(not same(found, wrong), f"{case} the gradient is a sum. Divide it by all samples.")
    check(
        not same(found, [each / len(SIZES) for each in wrong]),
        f"{case} you divided by the number of ranks. Divide by the number of samples.",
    )
    check(
        same(found, [parameter.grad for parameter in whole.parameters()]),
        f"{case} the gradient is not that of the mean loss over all {SAMPLES} samples. Does every "
        "sample count alike, whatever the size of its micro-batch? Does an old gradient count?",
    )


def same(found: list[Tensor], expected: list[Tensor]) -> bool:
    return all(close(one, other) for one, other in zip(found, expected, strict=True))


def samples() -> tuple[Tensor, Tensor]:
    inputs = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(0))
    return inputs, torch.arange(SAMPLES) % 3


def model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def gradients_of_a_rank(world: lockstep.World, solve: Any) -> tuple[list[Tensor | None], int]:
    """The gradients, and how many numbers went into collectives."""
    inputs, labels = samples()
    mine = model()
    for parameter in mine.parameters():
        parameter.grad = torch.ones_like(parameter)  # of an earlier step: it must not count
    before = sum(map(sum, SIZES[: world.rank]))
    micro_batches = []
    for size in SIZES[world.rank]:
        micro_batches.append((inputs[before : before + size], labels[before : before + size]))
        before += size
    sent, names = 0, ("all_reduce", "all_gather", "reduce", "broadcast", "all_gather_into_tensor")

    def counted(original: Any) -> Any:
        def call(*arguments: Any, **keywords: Any) -> Any:
            nonlocal sent
            tensor = keywords.get("tensor", arguments[0] if arguments else None)
            numbers = tensor.numel() if isinstance(tensor, Tensor) else 0
            sent += numbers
            check_call(original.__name__, [*arguments, *keywords.values()])
            return original(*arguments, **keywords)

        return call

    with replaced(names, counted):
        solve(mine, micro_batches)
        check_alike("has returned")
    return [parameter.grad for parameter in mine.parameters()], sent
