"""Ranks that were set up differently: the first field that differs is named, on all ranks,
before anything is broadcast.
"""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from torch import nn

import lockstep
from lockstep.errors import ReplicaDivergence
from tests.teams import on_team


def model(rank: int, mistake: str) -> nn.Module:
    wrong = rank == 1
    a, b = ("b", "a") if wrong and mistake == "order" else ("a", "b")
    width = 9 if wrong and mistake == "shape" else 8
    net: nn.Module = nn.Sequential(
        OrderedDict([(a, nn.Linear(8, 8)), (b, nn.Linear(8, width if mistake == "shape" else 8))])
    )
    if wrong and mistake == "count":
        net.add_module("head", nn.Linear(8, 2))
    if wrong and mistake == "dtype":
        net = net.double()
    if wrong and mistake == "frozen":
        net.a.requires_grad_(False)  # type: ignore[union-attr]
    if mistake == "buffer":
        net.register_buffer("scale", torch.ones(2 if wrong else 1))
    return net


def build(
    world: lockstep.World, mistake: str, door: str, checks: str = "start"
) -> tuple[str, str, tuple[int, ...]]:
    net = model(world.rank, mistake)
    lr = 0.2 if mistake == "lr" and world.rank == 1 else 0.1
    seed = 5 * world.rank if mistake == "seed" else 0
    try:
        if door == "wrapper":
            lockstep.DistributedDataParallel(net)
        else:
            sgd = torch.optim.SGD(net.parameters(), lr=lr)
            lockstep.Stepper(net, sgd, seed=seed, checks=checks)  # type: ignore[arg-type]
    except ReplicaDivergence as error:
        return error.parameter, error.values["difference"], error.ranks
    return "nothing said", "", ()


MISTAKES = {
    "shape": (
        "parameter 'b.weight'",
        "rank 0 has [8, 8] float32 trained, rank 1 has [9, 8] float32 trained",
    ),
    "order": ("list of parameters", "at position 0 rank 0 has 'a.weight', rank 1 has 'b.weight'"),
    "count": ("list of parameters", "only rank 1 has 'head.weight', 'head.bias'"),
    "dtype": (
        "parameter 'a.weight'",
        "rank 0 has [8, 8] float32 trained, rank 1 has [8, 8] float64 trained",
    ),
    "frozen": (
        "parameter 'a.weight'",
        "rank 0 has [8, 8] float32 trained, rank 1 has [8, 8] float32 frozen",
    ),
    "buffer": ("buffer 'scale'", "rank 0 has [1] float32, rank 1 has [2] float32"),
}


@pytest.mark.parametrize("door", ["wrapper", "stepper"])
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_model_that_differs_is_named(mistake: str, door: str) -> None:
    assert on_team(build, 2, (mistake, door)) == [(*MISTAKES[mistake], (1,))] * 2


def test_an_optimizer_or_seed_that_differs_is_named_unless_checks_are_off() -> None:
    lr = ("optimizer group 0 lr", "rank 0 has 0.1, rank 1 has 0.2", (1,))
    seed = ("seed", "rank 0 has 0, ranks 1,2 have 5", (1, 2))
    assert on_team(build, 3, ("lr", "stepper")) == [lr] * 3
    assert on_team(build, 3, ("seed", "stepper")) == [seed] * 3
    assert on_team(build, 3, ("lr", "stepper", "off")) == [("nothing said", "", ())] * 3
