"""Training with compressed gradients: idle ranks, sharded updates, skipped steps, checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep.errors import LockstepWarning
from tests import zoo
from tests.gradients.compression.summing import EVERY, OWING
from tests.refused import refused
from tests.step.walking import same, walk
from tests.teams import on_team


@pytest.fixture
def world() -> Iterator[lockstep.World]:
    with lockstep.init(backend="gloo") as world:
        yield world


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(128, 40),
        nn.Tanh(),
        nn.Linear(40, 4),
    ).to(memory_format=torch.channels_last)


def images() -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(84, 1, 6, 6, generator=generator)
    return TensorDataset(x, x.flatten(1)[:, :4].argmax(1))


@dataclass
class Trained:
    losses: list[float]
    weights: list[Tensor]
    owed: dict[str, Tensor]


class Run:
    """`micro_batch` 4: a full window has 4 slots, the last of an epoch fewer."""

    def __init__(self, compress: str, update: str = "replicated") -> None:
        self.model = net()
        self.stepper = lockstep.Stepper(
            self.model,
            torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9),
            compress=compress,
            update=update,
            bucket_mb=2**-11,
            clip=5.0,
        )
        assert len(self.stepper.reducer.buckets) > 2
        self.loader = lockstep.Loader(images(), global_batch=16, micro_batch=4, seed=3)

    def train(self, epochs: int, stop: int | None = None) -> Trained:
        losses = []
        for window in chain.from_iterable(self.loader.epochs(epochs)):
            losses.append(walk(self.stepper, window).loss)
            if self.stepper.steps == stop:
                break
        weights = [value.clone() for value in self.model.state_dict().values()]
        return Trained(losses, weights, self.owed())

    def owed(self) -> dict[str, Tensor]:
        keepers = self.stepper.keepers()
        (keeper,) = (keeper for keeper in keepers if "compression" in type(keeper).__module__)
        return {name: value.clone() for name, value in keeper.kept()[1].items()}


def trained(world: lockstep.World, compress: str, updates: list[str]) -> list[Trained]:
    return [Run(compress, update).train(5) for update in updates]


@pytest.mark.parametrize("compress", EVERY)
@pytest.mark.parametrize("workers", [1, 2, pytest.param(5, marks=pytest.mark.rest)])
def test_it_learns_with_the_same_weights_on_all_ranks(compress: str, workers: int) -> None:
    """Also where ranks are idle. A sharded update has the replicated one's bits."""
    updates = ["replicated", "sharded"] if workers == 2 and compress != "fp16" else ["replicated"]
    ranks = on_team(trained, workers, (compress, updates))
    for rank in ranks:
        for result in rank:
            assert result.losses == rank[0].losses
            assert same(result.weights, ranks[0][0].weights)
    losses = ranks[0][0].losses
    assert sum(losses[-5:]) < 0.6 * sum(losses[:5])


def undisturbed(world: lockstep.World, compress: str) -> Trained:
    return Run(compress).train(2)


def begun(world: lockstep.World, compress: str, folder: Path) -> Trained:
    """Four steps, which are saved."""
    run = Run(compress)
    checkpoints = lockstep.Checkpoints(folder, run.stepper, run.loader)
    result = run.train(2, stop=4)
    checkpoints.save()
    checkpoints.close()
    return result


def resumed(
    world: lockstep.World, compress: str, folder: Path
) -> tuple[dict[str, Tensor], Trained]:
    """What is owed when it resumes, and what becomes of it."""
    run = Run(compress)
    assert lockstep.Checkpoints(folder, run.stepper, run.loader).resume() is not None
    return run.owed(), run.train(2)


@pytest.mark.parametrize("compress", OWING)
def test_a_resumed_training_is_the_one_that_was_not_stopped(compress: str, tmp_path: Path) -> None:
    expected = on_team(undisturbed, 2, (compress,))
    left = on_team(begun, 2, (compress, tmp_path))
    for rank, (owed, result) in enumerate(on_team(resumed, 2, (compress, tmp_path))):
        assert same(owed, left[rank].owed)
        assert result.losses == expected[rank].losses[4:]
        assert same(result.weights, expected[rank].weights)
        assert same(result.owed, expected[rank].owed)


@pytest.mark.parametrize(("before", "after"), [(3, 2), (3, 1), (2, 3)])
def test_at_another_number_of_ranks_nothing_that_is_owed_is_lost(
    before: int, after: int, tmp_path: Path
) -> None:
    left = [rank.owed for rank in on_team(begun, before, ("int8", tmp_path))]
    ranks = on_team(resumed, after, ("int8", tmp_path))
    for rank, (owed, result) in enumerate(ranks):
        for name in left[0]:
            expected = torch.zeros_like(owed[name])
            for one in left[rank::after]:
                expected = expected + one[name]
            assert torch.equal(owed[name], expected)
        assert len(result.losses) == 8
        assert same(result.weights, ranks[0][1].weights)


def skipped(
    world: lockstep.World, compress: str
) -> tuple[dict[str, Tensor], dict[str, Tensor], list[Tensor]]:
    """What is owed before and after a step that is skipped, and the weights after the next."""
    run = Run(compress)
    run.train(1, stop=3)
    before = run.owed()
    x, y = images()[:4]
    for inputs, classes in run.stepper.micro_batches([(x, y)]):
        factor = torch.nan if world.rank == 1 else 1.0
        run.stepper.backward(zoo.loss_sum(run.model(inputs), classes) * factor, weight=4)
    with pytest.warns(LockstepWarning, match="was skipped") if world.rank == 0 else torch.no_grad():
        assert not run.stepper.step().applied
    between = run.owed()
    assert walk(run.stepper, [(x, y)]).applied
    return before, between, [value.clone() for value in run.model.state_dict().values()]


@pytest.mark.parametrize("compress", OWING)
def test_a_skipped_step_leaves_what_is_owed_and_training_goes_on(compress: str) -> None:
    ranks = on_team(skipped, 2, (compress,))
    for before, between, weights in ranks:
        assert same(before, between)
        assert all(value.isfinite().all() for value in weights)
        assert same(weights, ranks[0][2])


def of_layers_that_come_and_go(world: lockstep.World) -> tuple[set[str], set[str]]:
    run = Run("int8")
    run.train(1, stop=2)
    before = run.owed()
    run.model[0].requires_grad_(False)
    run.stepper.reducer.reset()
    after = run.owed()
    assert torch.equal(before["error/6.weight"], after["error/6.weight"])
    return {*before}, {*after}


def test_a_frozen_layer_is_owed_nothing_and_others_keep_theirs() -> None:
    before, after = on_team(of_layers_that_come_and_go, 2)[0]
    assert before == {f"error/{name}" for name, _ in net().named_parameters()}
    assert before - after == {"error/0.weight", "error/0.bias"}


def stepper_for(model: nn.Module, **options: Any) -> lockstep.Stepper:
    return lockstep.Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1), **options)


def test_what_cannot_be_compressed_is_refused_or_warned_of(world: lockstep.World) -> None:
    model = nn.Sequential(nn.Linear(20, 8), nn.Linear(8, 16))
    with refused("powersgd-rank-too-large", compress="powersgd:9", columns=9, parameter="0.weight"):
        stepper_for(model, compress="powersgd:9")
    with pytest.warns(LockstepWarning, match="makes no gradient of this model smaller"):
        stepper_for(model, compress="powersgd:8")
    with refused("powersgd-without-matrix", compress="powersgd:1"):
        stepper_for(nn.LayerNorm(8), compress="powersgd:1")
    scaler = torch.amp.GradScaler("cpu")
    with refused("loss-scaler-does-not-fit", option="compress='int8'"):
        stepper_for(net(), compress="int8", scaler=scaler)
    for options in ({"compress": "fp16", "scaler": scaler}, {"compress": "powersgd:2"}):
        assert stepper_for(net(), **options).reducer.reduction.name == options["compress"]
    with refused("needs-bare-module", option="compress='bf16'"):
        stepper_for(lockstep.DistributedDataParallel(net()), compress="bf16")
    model[1].weight = nn.Parameter(torch.zeros(16, 8, dtype=torch.complex64))
    for compress in EVERY:
        with refused("compress-not-floats", compress=compress, parameter="1.weight"):
            stepper_for(model, compress=compress)
