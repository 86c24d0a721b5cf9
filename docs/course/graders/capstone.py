"""Grader of the capstone: on 2, 3 and 1 ranks against one process without a group."""

from __future__ import annotations

import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from grading import check, check_alike, check_call, close, on_ranks, replaced
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

SAMPLES, GLOBAL_BATCH, EPOCHS, LR = 25, 8, 2, 0.5
"""The last step of an epoch has one sample, so some ranks have none."""
COLLECTIVES = ("all_reduce", "all_gather", "all_gather_object", "broadcast", "reduce", "barrier")


class Numbers(Dataset[tuple[Tensor, Tensor]]):
    """The first number of each input is the number of the sample."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(SAMPLES, 5, generator=generator)
        self.labels = (self.inputs.sum(1) > 0).long()
        self.inputs[:, 0] = torch.arange(SAMPLES)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.labels[index]


class Broken(Numbers):
    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        raise ZeroDivisionError("the dataset of the grader fails on purpose")


class Net(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            self.seen += x[:, 0].int().tolist()
        logits: Tensor = self.layers(x[:, 1:])
        return logits


@dataclass
class Trained:
    """What a rank is left with."""

    losses: Any
    weights: list[Tensor]
    seen: list[int] = field(default_factory=list)
    left_open: bool = False
    failed: bool = False
    left_open_after_failure: bool = False


def grade(lesson: ModuleType) -> None:
    expected = one_process(lesson.order)
    for size in (2, 3, 1):
        with tempfile.TemporaryDirectory() as folder:
            ranks = on_ranks(trained, size, lesson.distributed_train, folder, open_world=False)
        case = f"On {size} ranks" if size > 1 else "On 1 rank"
        check_group(case, ranks)
        check_samples(case, ranks)
        check_weights(case, ranks, expected, lesson.order)
        check_losses(case, ranks, expected)


def trained(distributed_train: Callable[..., Any], folder: str) -> Trained:
    """On a rank: train once, and once with a dataset that fails."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    for name in list(os.environ):
        if name in ("RANK", "WORLD_SIZE", "LOCAL_RANK") or name.startswith(("MASTER_", "TORCHEL")):
            del os.environ[name]

    def train(dataset: Numbers, model: Net) -> Any:
        return distributed_train(
            rank,
            size,
            EPOCHS,
            init_method=f"file://{folder}/{type(dataset).__name__}",
            dataset=dataset,
            model=model,
            global_batch=GLOBAL_BATCH,
            lr=LR,
        )

    model = Net(seed=rank)
    with compared_collectives():
        losses = train(Numbers(), model)
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    result = Trained(losses, weights, model.seen, left_open=dist.is_initialized())
    if result.left_open:
        return result
    try:
        train(Broken(), Net(seed=rank))
    except Exception:  # its own, or that of a connection which another rank has closed
        result.failed = True
    result.left_open_after_failure = dist.is_initialized()
    return result


@contextmanager
def compared_collectives() -> Iterator[None]:
    """Raise Wrong on all ranks where they call different collectives, or where one leaves."""

    def compared(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            check_call(original.__name__, [*arguments, *keywords.values()])
            return original(*arguments, **keywords)

        return call

    def together(destroy_process_group: Callable[..., Any]) -> Callable[..., Any]:
        def leave(*arguments: Any) -> None:
            if sys.exc_info()[0] is None:
                check_alike("leaves the group")
            destroy_process_group(*arguments)

        return leave

    with replaced(COLLECTIVES, compared), replaced(["destroy_process_group"], together):
        yield


def one_process(
    order: Callable[[int, int], list[int]],
    divisor: Callable[[int], float] = float,
    means_of: int = 0,
) -> Trained:
    """Train without a group.

    Args:
        order: of an epoch.
        divisor: by what the gradient of the sum over a step is divided, from its samples.
        means_of: 0, or the ranks whose means are averaged: a wrong training.
    """
    model, data = Net(seed=0), Numbers()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    losses = []
    for epoch in range(EPOCHS):
        indices, total = order(SAMPLES, epoch), 0.0
        for first in range(0, SAMPLES, GLOBAL_BATCH):
            step = indices[first : first + GLOBAL_BATCH]
            optimizer.zero_grad()
            parts = [step[rank::means_of] for rank in range(means_of)] or [step]
            for part in parts:
                if not part:
                    continue
                logits = model(data.inputs[part])
                loss = F.cross_entropy(logits, data.labels[part], reduction="sum")
                total += loss.item()
                scale = len(part) * means_of if means_of else divisor(len(step))
                (loss / scale).backward()
            optimizer.step()
        losses.append(total / SAMPLES)
    return Trained(losses, [parameter.detach() for parameter in model.parameters()])


def check_group(case: str, ranks: list[Trained]) -> None:
    for rank, result in enumerate(ranks):
        check(not result.left_open, f"{case} rank {rank} left the process group open.")
        check(
            result.failed,
            f"{case} the dataset raised an exception, and it did not come out on rank {rank}.",
        )
        check(
            not result.left_open_after_failure,
            f"{case} rank {rank} left the process group open after an exception. Close it in a "
            "finally block.",
        )


def check_samples(case: str, ranks: list[Trained]) -> None:
    times = Counter(sample for result in ranks for sample in result.seen)
    counts = [times[sample] for sample in range(SAMPLES)]
    check(
        len(ranks) == 1 or counts != [EPOCHS * len(ranks)] * SAMPLES,
        f"{case} every rank trained on all samples. Divide each step among the ranks.",
    )
    rare, often = min(counts), max(counts)
    check(
        rare >= EPOCHS,
        f"{case} sample {counts.index(rare)} was used {rare} times in {EPOCHS} epochs. Was a short "
        "last step dropped?",
    )
    check(
        often <= EPOCHS,
        f"{case} sample {counts.index(often)} was used {often} times in {EPOCHS} epochs. Do not pad.",
    )
    for rank, result in enumerate(ranks):
        half = len(result.seen) // 2
        check(
            result.seen[:half] != result.seen[half:],
            f"{case} both epochs have the same order on rank {rank}. Give order() the epoch.",
        )


def check_weights(
    case: str,
    ranks: list[Trained],
    expected: Trained,
    order: Callable[[int, int], list[int]],
) -> None:
    for rank, result in enumerate(ranks):
        check(
            same(result.weights, ranks[0].weights),
            f"{case} the weights of rank {rank} differ from those of rank 0 after the training. Were "
            "the first weights broadcast? Are all gradients averaged, also of a rank without samples?",
        )
    size = len(ranks)
    wrongs = {
        "You added the gradients up, and did not divide.": one_process(order, lambda samples: 1.0),
        f"You divided the sum of the gradients by {size}, the number of ranks. Divide by the "
        "samples of the step.": one_process(order, lambda samples: float(size)),
        "You averaged the means of the ranks. A rank with fewer samples must count less.": (
            one_process(order, means_of=size)
        ),
    }
    right = same(ranks[0].weights, expected.weights)
    for sentence, wrong in wrongs.items():
        check(right or not same(ranks[0].weights, wrong.weights), f"{case}: {sentence}")
    check(right, f"{case} the weights are not those of one process with all samples of each step.")


def check_losses(case: str, ranks: list[Trained], expected: Trained) -> None:
    for rank, result in enumerate(ranks):
        check(
            isinstance(result.losses, list) and len(result.losses) == EPOCHS,
            f"{case} return a list with one loss for each epoch.",
        )
        check(
            close(result.losses, ranks[0].losses),
            f"{case} rank {rank} returned {result.losses}, and rank 0 {ranks[0].losses}. Add up the "
            "losses of all ranks.",
        )
    check(
        close(ranks[0].losses, expected.losses, 1e-4),
        f"{case} the losses are {ranks[0].losses}. The means over all samples are "
        f"{expected.losses}. Add up the loss of every sample, of all steps and ranks, and divide once.",
    )


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(close(left, right, 1e-4) for left, right in zip(one, other, strict=True))
