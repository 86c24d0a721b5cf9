"""Every sample counts once, whatever the number of ranks, and the numbers are the same to the last bit."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import lockstep
from lockstep.errors import TaskError, WorkerFailed
from lockstep.testing import run_ranks
from lockstep.training.evaluate import Evaluation
from lockstep.training.forward import Forward
from tests.training import toy


def evaluated(world: lockstep.World, model: nn.Module, loader_workers: int = 0, **changes: Any) -> dict[str, float]:
    task = toy.task(eval_micro_batch=4, **changes)
    return Evaluation(task, Forward(model, task, "fp32", world.device), world, loader_workers=loader_workers)()


def net() -> toy.Net:
    torch.manual_seed(3)
    return toy.Net()


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    """Draws from the sample's stream."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.randn(6) + random.random(), torch.tensor(index % 3)


class Stochastic(toy.Net):
    """Draws in the forward, also in eval mode."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + torch.randn(3)


def on_rank(world: lockstep.World) -> dict[str, dict[str, float]]:
    torch.manual_seed(5)
    stochastic = Stochastic()
    torch.manual_seed(100 + world.rank)
    random.seed(100 + world.rank)
    return {"plain": evaluated(world, net()), "random": evaluated(world, stochastic, eval_data=Noisy())}


def test_the_same_bits_for_every_number_of_ranks() -> None:
    with lockstep.init(backend="gloo") as world:
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        alone = on_rank(world)
        torch.set_num_threads(before)
    for workers in (2, 3, 7):  # 6 and 3 batches: ragged shares, and ranks that have none
        assert run_ranks(on_rank, workers) == [alone] * workers


def test_it_is_the_mean_over_the_whole_set() -> None:
    model, data = net(), toy.data(toy.HELD_OUT, 2)[:]
    with lockstep.init(backend="gloo") as world:
        found = evaluated(world, model)
    with torch.no_grad():
        output = model.eval()(data[0])
    assert list(found) == ["accuracy", "loss"]
    assert found["accuracy"] == (output.argmax(1) == data[1]).double().mean().item()
    assert found["loss"] == pytest.approx(nn.functional.cross_entropy(output, data[1]).item(), rel=1e-6)


def test_modes_gradients_and_random_states_are_put_back() -> None:
    model = net()
    model.norm.eval()
    statistics = model.norm.running_mean.clone()  # type: ignore[union-attr,operator]
    state = torch.get_rng_state()
    with lockstep.init(backend="gloo") as world:
        evaluated(world, model)
    assert (model.training, model.norm.training, model.drop.training) == (True, False, True)
    assert torch.equal(model.norm.running_mean, statistics)  # type: ignore[arg-type]
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_loader_workers_change_nothing() -> None:
    with lockstep.init(backend="gloo") as world:
        model = net()
        assert evaluated(world, model, eval_data=Noisy(), loader_workers=1) == evaluated(world, model, eval_data=Noisy())


def test_weights_of_zero_give_nan() -> None:
    with lockstep.init(backend="gloo") as world:
        found = evaluated(world, net(), metrics=lambda output, batch: {"none": (0.0, 0)})
    assert str(found["none"]) == "nan"


def test_metrics_that_change_their_names_or_are_no_numbers() -> None:
    def changing(output: Tensor, batch: Any) -> dict[str, tuple[float, int]]:
        return {f"of_{len(output)}": (1.0, 1)}

    with lockstep.init(backend="gloo") as world:
        with pytest.raises(TaskError, match="metrics gave loss, of_1 for one batch and loss, of_4 for the first"):
            evaluated(world, net(), metrics=changing)
        with pytest.raises(TaskError, match=r"metric 'each' is \(sum, weight\) of shapes \[\[4\], \[\]\]: sum them"):
            evaluated(world, net(), metrics=lambda output, batch: {"each": (batch[1], 1)})


def wrong_on_one(world: lockstep.World) -> None:
    def metrics(output: Tensor, batch: Any) -> dict[str, tuple[float, int]]:
        raise ZeroDivisionError("mine")

    evaluated(world, net(), metrics=metrics if world.rank == 1 else None)


def test_an_exception_on_one_rank_is_told() -> None:
    with pytest.raises(WorkerFailed, match="mine") as failed:
        run_ranks(wrong_on_one, 2)
    assert failed.value.rank == 1
