"""What goes wrong in silence with torch's samplers and workers (cases M10, M12 to M14): here it
cannot, or is said.
"""

from __future__ import annotations

import tracemalloc
import warnings
from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils.data import DistributedSampler

from lockstep.data.loader import Loader
from lockstep.data.orders import Weighted
from lockstep.errors import ReplicaDivergence
from lockstep.step.stepper import Stepper
from lockstep.world.world import World
from tests.data.datasets import Augmented, Numbers
from tests.data.test_loader import as_data
from tests.teams import on_team


def samples(loader: Loader, epochs: int) -> list[list[Any]]:
    """Every epoch's batches, one after the other."""
    return [
        [as_data(batch) for window in epoch for batch in window] for epoch in loader.epochs(epochs)
    ]


def on(rank: int, size: int, dataset: Any, **options: Any) -> Loader:
    return Loader(
        dataset, rank=rank, size=size, global_batch=8, micro_batch=2, device="cpu", **options
    )


def test_m10_every_epoch_has_an_order_of_its_own_without_set_epoch() -> None:
    first, second = samples(on(0, 1, Numbers(64)), 2)
    assert first != second


def test_m10_a_distributed_sampler_without_set_epoch_is_noticed_said_once_and_corrected() -> None:
    sampler: DistributedSampler[int] = DistributedSampler(
        Numbers(21), num_replicas=2, rank=0, seed=3
    )  # type: ignore[arg-type]
    with pytest.warns(
        UserWarning, match=r"DistributedSampler.set_epoch\(1\) was not called"
    ) as said:
        epochs = samples(on(0, 1, Numbers(21), order=sampler), 4)
    assert len(said) == 1
    orders = [[index for batch in epoch for index in batch] for epoch in epochs]
    assert len({tuple(order) for order in orders}) == 4
    # all ranks' samples, none padded
    assert [Counter(order) for order in orders] == [Counter(range(21))] * 4


def test_m10_a_sampler_that_is_told_is_not_complained_of() -> None:
    sampler: DistributedSampler[int] = DistributedSampler(Numbers(16), num_replicas=2, rank=0)  # type: ignore[arg-type]
    loader = on(0, 1, Numbers(16), order=sampler)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for number in range(3):
            sampler.set_epoch(number)
            (epoch,) = loader.epochs(number + 1, start=number)
            assert sum(len(batch) for window in epoch for batch in window) == 16


@pytest.mark.parametrize("workers", [0, 1])
def test_m12_no_two_samples_are_augmented_alike_whatever_the_process_was_seeded_with(
    workers: int,
) -> None:
    drawn = []
    for rank in range(2):
        torch.manual_seed(0)  # the same on both ranks
        loader = on(rank, 2, Augmented(32), num_workers=workers)
        drawn += [tuple(row) for epoch in samples(loader, 2) for _, rows in epoch for row in rows]
        loader.close()
    assert len(drawn) == 64
    for library in range(3):
        assert len({row[library] for row in drawn}) == 64


def test_m13_weighted_draws_without_replacement_are_disjoint_over_the_ranks() -> None:
    weights = torch.arange(1, 1001, dtype=torch.float64).tolist()
    order = Weighted(weights, samples=1000, replacement=False, seed=0)
    seen: Counter[int] = Counter()
    for rank in range(2):
        (batches,) = samples(on(rank, 2, Numbers(1000), order=order), 1)
        for batch in batches:
            seen.update(batch)
    assert seen == Counter(range(1000))  # torch's per-rank samplers: 240 on both ranks, 240 never


def test_m14_an_epoch_of_a_hundred_million_samples_begins_at_once() -> None:
    """torch's DistributedSampler: 17 s and 4.6 GiB in every rank."""
    tracemalloc.start()
    try:
        loader = on(3, 8, Numbers(10**8))
        window = next(iter(next(loader.epochs(1))))
        assert len(list(window)) == len(window)
        assert tracemalloc.get_traced_memory()[1] < 2**21
    finally:
        tracemalloc.stop()


def differing(world: World, what: str) -> str | None:
    model = torch.nn.Linear(1, 1)
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1))
    indices = [0, 1, 2, 3] if world.rank == 0 else [4, 5, 6, 7]
    order = torch.utils.data.SubsetRandomSampler(indices) if what == "order" else None
    length = 9 if world.rank and what == "dataset length" else 8
    loader = on(world.rank, world.size, Numbers(length), order=order)
    try:
        for window in next(loader.epochs(1)):
            for _ in stepper.micro_batches(window):
                pass
    except ReplicaDivergence as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    "message",
    [
        "dataset length differs: rank 0 has 8, rank 1 has 9",
        "order differs: rank 0 has sampler SubsetRandomSampler",
    ],
)
def test_ranks_that_walk_other_data_are_told_apart_before_the_first_step(message: str) -> None:
    for said in on_team(differing, 2, args=(message.partition(" differs")[0],)):
        assert said is not None
        assert said.startswith(message)
