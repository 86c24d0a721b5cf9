"""Exact mode: what it takes and refuses. Its bits: promises/test_same_gradients.py."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset, IterableDataset, TensorDataset

import lockstep
from lockstep.errors import LateGradient
from lockstep.testing import run_ranks
from tests.refused import refused
from tests.step.walking import walk, walk_epochs, weights
from tests.teams import on_team


@pytest.fixture
def world() -> Iterator[lockstep.World]:
    with lockstep.init(backend="gloo") as world:
        yield world


def vectors(count: int = 64) -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    return TensorDataset(
        torch.randn(count, 36, generator=generator),
        torch.randint(0, 10, (count,), generator=generator),
    )


def loader() -> lockstep.Loader:
    """Two steps of eight micro-batches."""
    return lockstep.Loader(vectors(), global_batch=32, micro_batch=4)


def stepper_of(model: nn.Module | None = None, **options: Any) -> lockstep.Stepper:
    torch.manual_seed(0)
    model = model or nn.Linear(36, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return lockstep.Stepper(model, optimizer, exact=True, **options)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(vectors())


class Few(Dataset[tuple[Tensor, int]]):
    def __len__(self) -> int:
        return 3

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        return torch.full((36,), number + 1.0), number


def trained(world: lockstep.World) -> list[list[Tensor]]:
    """Weights after a stream of 7 micro-batches a step, and after fewer samples than ranks."""
    stream, few = stepper_of(), stepper_of()
    walk_epochs(stream, lockstep.Loader(Stream(), global_batch=20, micro_batch=3), 1)
    walk_epochs(few, lockstep.Loader(Few(), global_batch=8, micro_batch=1), 2)
    return [weights(stream.model), weights(few.model)]


def test_streams_and_fewer_samples_than_ranks_have_the_bits_of_one_rank() -> None:
    (expected,) = on_team(trained, 1)
    for size in (2, 5):
        for ours in on_team(trained, size):
            for one, other in zip(ours, expected, strict=True):
                assert all(map(torch.equal, one, other)), size


def broken_off(world: lockstep.World) -> list[Tensor]:
    """Every rank leaves its loop after one micro-batch: the others are absent."""
    stepper = stepper_of()
    for window in chain.from_iterable(loader().epochs(1)):
        for x, y in stepper.micro_batches(window):
            loss = F.cross_entropy(stepper.model(x), y, reduction="sum")
            stepper.backward(loss, weight=len(y))
            break
        stepper.step()
    return weights(stepper.model)


def test_a_loop_that_is_left_early_counts_what_it_walked() -> None:
    first, second = on_team(broken_off, 2)
    assert all(map(torch.equal, first, second))
    torch.manual_seed(0)
    model = nn.Linear(36, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    alone = lockstep.Loader(vectors(), global_batch=32, micro_batch=4, rank=0, size=1)
    for window in chain.from_iterable(alone.epochs(1)):
        optimizer.zero_grad()
        (x, y), (z, w) = window[0], window[4]
        F.cross_entropy(model(torch.cat([x, z])), torch.cat([y, w])).backward()
        optimizer.step()
    torch.testing.assert_close(first, weights(model), rtol=1e-5, atol=1e-6)


def refusals(world: lockstep.World) -> None:
    model = nn.Linear(36, 10)
    for reduce in ("central", "hierarchical", "ring"):
        with refused("exact-with-reduce", reduce=reduce):
            stepper_of(reduce=reduce)
    with refused("needs-bare-module"):
        stepper_of(lockstep.DistributedDataParallel(model))
    stepper = stepper_of(model)
    with refused("exact-without-slots"):
        next(iter(stepper.micro_batches([vectors(4)[:]])))
    for cut_by_ranks in (
        lockstep.Loader(vectors(), batch_per_rank=8),
        lockstep.Loader(vectors(), global_batch=8),
        lockstep.Loader(Stream(), global_batch=8, micro_batch=2, sharding="dataset"),
    ):
        window = next(chain.from_iterable(cut_by_ranks.epochs(1)))
        with refused("exact-cut-by-ranks"):
            next(iter(stepper.micro_batches(window)))


@pytest.mark.parametrize("workers", [1, 2])
def test_what_cannot_be_exact_is_refused(workers: int) -> None:
    on_team(refusals, workers)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(36, 36)

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        for _ in range(2):
            x = checkpoint(self.inner, x, use_reentrant=True)
        return x


def test_gradients_that_would_count_twice_are_refused(world: lockstep.World) -> None:
    window = next(chain.from_iterable(loader().epochs(1)))
    stepper = stepper_of()
    for x, y in stepper.micro_batches(window):
        stepper.backward(F.cross_entropy(stepper.model(x), y, reduction="sum"), weight=len(y))
    stepper.model(x).sum().backward()  # when the gradients belong to the sum
    with refused("gradient-cleared"):
        stepper.step()
    with refused("second-gradient-in-micro-batch", LateGradient):
        walk(stepper_of(Twice()), window)


def settings_of_the_process(world: lockstep.World) -> list[Any]:
    def now() -> tuple[Any, ...]:
        return (
            torch.get_num_threads(),
            torch.are_deterministic_algorithms_enabled(),
            torch.backends.cudnn.benchmark,
        )

    torch.set_num_threads(2)
    torch.backends.cudnn.benchmark = True
    before = now()
    stepper_of()
    during = now()
    with pytest.raises(RuntimeError, match="put_"):
        torch.empty(3).put_(torch.tensor([0, 0]), torch.ones(2))
    world.close()
    return [before, during, now()]


def test_the_process_computes_deterministically_until_the_world_closes() -> None:
    """Meanwhile operations that cannot are refused."""
    assert run_ranks(settings_of_the_process, 1) == [
        [(2, False, True), (1, True, False), (2, False, True)]
    ]
