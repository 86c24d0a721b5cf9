"""Grader 1: against one forward and backward pass over the whole batch."""

from __future__ import annotations

from types import ModuleType

import torch
from grading import check, close
from torch import Tensor, nn
from torch.nn import functional as F

SAMPLES = 10


def grade(lesson: ModuleType) -> None:
    inputs = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(SAMPLES) % 3
    for micro_batch in (5, 4, 1, 16):
        check_one(lesson, inputs, labels, micro_batch)


def check_one(lesson: ModuleType, inputs: Tensor, labels: Tensor, micro_batch: int) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    F.cross_entropy(model(inputs), labels).backward()
    expected = [each.grad.clone() for each in model.parameters()]
    weights = [each.detach().clone() for each in model.parameters()]
    seen: list[int] = []
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)  # of an earlier step: it must not count
    hook = model.register_forward_pre_hook(lambda _, arguments: seen.append(len(arguments[0])))
    found = lesson.gradient_in_parts(model, inputs, labels, micro_batch)
    hook.remove()

    case = f"With {SAMPLES} samples and micro_batch={micro_batch}"
    check(
        max(seen, default=0) <= micro_batch,
        f"{case} the model saw {max(seen, default=0)} samples in one forward pass.",
    )
    check(sum(seen) == SAMPLES, f"{case} the model saw {sum(seen)} samples in all.")
    check(
        isinstance(found, list) and len(found) == len(expected),
        f"{case}: return a list with one gradient for each of {len(expected)} parameters.",
    )
    check(
        not all(map(differs_by_one_number, found, expected)),
        f"{case} the gradient of an earlier step is in the result. Zero the gradients first.",
    )
    check(
        not close(found[2], expected[2] * SAMPLES),
        f"{case} you returned the sum over the samples. Divide by the number of samples.",
    )
    check(
        not close(found[2], mean_of_means(model, inputs, labels, micro_batch)[2])
        or SAMPLES % micro_batch == 0
        or micro_batch > SAMPLES,
        f"{case} you averaged the means of the micro-batches. A micro-batch with fewer samples "
        "must count less.",
    )
    for name, one, other in zip(dict(model.named_parameters()), found, expected, strict=True):
        check(close(one, other), f"{case} the gradient of {name} is not that of the whole batch.")
    check(all(map(torch.equal, model.parameters(), weights)), f"{case} the weights have changed.")


def differs_by_one_number(found: Tensor, expected: Tensor) -> bool:
    """Whether the gradient of ones is in it, however it was divided."""
    if found.shape != expected.shape or close(found, expected):
        return False
    return close(found - expected, (found - expected).mean().expand_as(found))


def mean_of_means(
    model: nn.Module, inputs: Tensor, labels: Tensor, micro_batch: int
) -> list[Tensor]:
    """The usual mistake."""
    parts = [
        torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))
        for x, y in zip(inputs.split(micro_batch), labels.split(micro_batch), strict=True)
    ]
    return [torch.stack(each).mean(0) for each in zip(*parts, strict=True)]
