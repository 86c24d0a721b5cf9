"""What goes wrong in silence with torch's samplers and workers (cases M12 and M14): here it cannot,
or is said. M10 and M13: tests/data/orders.
"""

from __future__ import annotations

import tracemalloc
from typing import Any

import pytest
import torch

from lockstep.data.loader import Loader
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
