"""Two ranks share one device, over gloo: exact and sharded trainings are those of one rank, and a replica that differs is found."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import lockstep
from lockstep.errors import ReplicaDivergence
from tests.gpu.training import Training, close, equal


def train(device: str, options: dict[str, Any]) -> dict[str, Tensor]:
    with lockstep.init(backend="gloo", device=device) as world:
        assert world.device.type == device
        return Training(world, **options).walk().weights()


def flip(device: str) -> tuple[str, list[int]]:
    """One element of one weight differs on rank 1."""
    with lockstep.init(backend="gloo", device=device) as world:
        training = Training(world).walk(2)
        if world.rank == 1:
            with torch.no_grad():
                next(training.model.parameters())[3, 5] += 1
        with pytest.raises(ReplicaDivergence) as caught:
            training.stepper.check_replicas()
        return str(caught.value), list(caught.value.values["ranks"])


@pytest.mark.parametrize("options", [{}, {"update": "sharded"}], ids=["replicated", "sharded"])
def test_two_ranks_have_the_bits_of_one_in_exact_mode(device: str, options: dict[str, Any]) -> None:
    exact = {"exact": True, **options}
    (alone,) = lockstep.launch(train, workers=1, args=(device, exact))
    first, second = lockstep.launch(train, workers=2, args=(device, exact))
    assert equal(first, second)
    assert equal(first, alone)


@pytest.mark.parametrize(
    "options", [{}, {"update": "sharded"}, {"reduce": "native"}], ids=["auto", "sharded", "native"]
)
def test_two_ranks_train_as_one(device: str, options: dict[str, Any]) -> None:
    (alone,) = lockstep.launch(train, workers=1, args=(device, {}))
    first, second = lockstep.launch(train, workers=2, args=(device, options))
    assert equal(first, second)
    close(first, alone, 1e-4)


def test_a_replica_that_differs_is_named(device: str) -> None:
    for message, ranks in lockstep.launch(flip, workers=2, args=(device,)):
        assert "0.weight" in message
        assert ranks == [1]
