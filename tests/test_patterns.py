"""Training loops that are not `loss(model(x))`: each gives the same weights on several ranks as
on one. test_recipes.py has moving averages and adapters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import TensorDataset

import lockstep
from lockstep.step.step_result import StepResult
from tests import zoo
from tests.teams import on_team

Weights = list[Tensor]


def loader(samples: int = 36, global_batch: int = 12, micro_batch: int = 3) -> lockstep.Loader:
    return lockstep.Loader(
        TensorDataset(*zoo.samples(samples)),
        global_batch=global_batch,
        micro_batch=micro_batch,
        seed=3,
    )


def sgd(model: nn.Module, lr: float = 0.05) -> torch.optim.Optimizer:
    return torch.optim.SGD(
        [parameter for parameter in model.parameters() if parameter.requires_grad],
        lr=lr,
        momentum=0.9,
    )


def compare(ours: Iterable[Tensor], theirs: Iterable[Tensor], bound: float = 1e-6) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert zoo.distance(one, other) < bound


def train(
    stepper: lockstep.Stepper,
    loss: Callable[[Tensor, Tensor], Tensor],
    epochs: int = 2,
    after: Callable[[StepResult], object] = lambda result: None,
) -> None:
    for epoch in loader().epochs(epochs):
        for window in epoch:
            for x, y in stepper.micro_batches(window):
                stepper.backward(loss(x, y), weight=len(y))
            after(stepper.step())


def gan(world: lockstep.World) -> Weights:
    """Two models, two steppers, one window: the discriminator learns from it, then the
    generator.
    """
    torch.manual_seed(1)
    make, judge = nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    maker, judger = lockstep.Stepper(make, sgd(make)), lockstep.Stepper(judge, sgd(judge))
    for epoch in loader().epochs(2):
        for window in epoch:
            for x, _ in judger.micro_batches(window):
                with torch.no_grad():
                    fake = make(torch.randn_like(x))
                judger.backward(
                    F.softplus(-judge(x)).sum() + F.softplus(judge(fake)).sum(), weight=len(x)
                )
            judger.step()
            judge.requires_grad_(False)
            for x, _ in maker.micro_batches(window):
                maker.backward(F.softplus(-judge(make(torch.randn_like(x)))).sum(), weight=len(x))
            maker.step()
            judge.requires_grad_(True)
    return zoo.weights(make, judge)


def inner_steps(world: lockstep.World) -> Weights:
    """Three updates from one window."""
    model = zoo.build("mlp")
    stepper = lockstep.Stepper(model, sgd(model))
    for epoch in loader().epochs(1):
        for window in epoch:
            for _ in range(3):
                for x, y in stepper.micro_batches(window):
                    stepper.backward(zoo.loss_sum(model(x), y), weight=len(y))
                stepper.step()
    return zoo.weights(model)


def gradient_penalty(world: lockstep.World) -> Weights:
    """A backward through the gradient of the inputs."""
    model = zoo.build("mlp")

    def loss(x: Tensor, y: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        output = model(x)
        (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        return zoo.loss_sum(output, y) + slope.square().sum()

    train(lockstep.Stepper(model, sgd(model, lr=0.01)), loss)
    return zoo.weights(model)


class Chained(torch.optim.Optimizer):
    """Of the guide (windows.md): several optimizers that step together; groups and state are
    theirs.
    """

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self.optimizers = optimizers
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        super().__init__(groups, {})
        self._share()

    def _share(self) -> None:
        groups = iter(self.param_groups)
        for each in self.optimizers:
            each.param_groups = [next(groups) for _ in each.param_groups]
            each.state = self.state

    def load_state_dict(self, state: Any) -> None:
        super().load_state_dict(state)
        self._share()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for each in self.optimizers:
            each.step()


def two_optimizers(world: lockstep.World) -> Weights:
    """One model, matrices and vectors by optimizers of their own; torch's moving average. The
    state goes to another Stepper on the way.
    """
    model = zoo.build("mlp")
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))

    def stepper_of() -> lockstep.Stepper:
        matrices, others = (
            [p for p in model.parameters() if (p.ndim == 2) == wanted] for wanted in (True, False)
        )
        return lockstep.Stepper(
            model,
            Chained(torch.optim.Muon(matrices, lr=0.02), torch.optim.Adam(others, lr=1e-2)),
            clip=1.0,
        )

    stepper = stepper_of()
    for _ in range(2):
        state = stepper.optimizer_state_dict()
        stepper = stepper_of()
        stepper.load_optimizer_state_dict(state)
        train(
            stepper,
            lambda x, y: zoo.loss_sum(model(x), y),
            epochs=1,
            after=lambda result: average.update_parameters(model) if result.applied else None,
        )
    assert len(stepper.optimizer_state_dict()["state"]) == 6
    return zoo.weights(model, average.module)


PATTERNS: list[Callable[[lockstep.World], Weights]] = [
    gan,
    inner_steps,
    gradient_penalty,
    two_optimizers,
]


@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda pattern: pattern.__name__)
def test_a_pattern_does_not_depend_on_the_number_of_ranks(
    pattern: Callable[[lockstep.World], Weights],
) -> None:
    (alone,) = on_team(pattern, 1)
    for workers in (2, 3):
        for rank in on_team(pattern, workers):
            compare(rank, alone)


def overflow(world: lockstep.World) -> tuple[list[bool], list[float], Weights]:
    """An inf in the gradient of one rank, in one step."""
    model = zoo.build("mlp")
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    stepper = lockstep.Stepper(model, sgd(model), scaler=scaler)
    applied, scales = [], []
    for step in range(3):
        x, y = zoo.samples(8)
        for u, v in stepper.micro_batches([(x[:4], y[:4])] if world.rank else [(x[4:], y[4:])]):
            loss = zoo.loss_sum(model(u), v)
            stepper.backward(
                loss * math.inf if step == 1 and world.rank == 1 else loss, weight=len(v)
            )
        result = stepper.step()
        applied.append(result.applied)
        assert result.applied or "overflowed at loss scale 256; it is 128 now" in (
            result.reason or ""
        )
        scales.append(scaler.get_scale())
    return applied, scales, zoo.weights(model)


def test_an_inf_on_one_rank_skips_the_step_on_all_with_equal_scalers() -> None:
    first, second = on_team(overflow, 2)
    assert first[0] == second[0] == [True, False, True]
    assert first[1] == second[1] == [256.0, 128.0, 128.0]
    for a, b in zip(first[2], second[2], strict=True):
        assert torch.equal(a, b)
        assert a.isfinite().all()


RAGGED = [1, 7, 3, 12, 2, 9, 5, 4, 6, 11, 4]  # 64 samples


class Everything(nn.Module):
    """Frozen, unused, tied, scalar and sparsely used parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.awkward = zoo.Awkward()
        self.embed = nn.Embedding(40, 6, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.awkward(x + self.embed((x[:, 0].abs() * 12).long().clamp(max=39)))


def everything() -> nn.Module:
    torch.manual_seed(5)
    return Everything()


def batches() -> list[tuple[Tensor, Tensor]]:
    x, y = zoo.samples(64)
    return list(zip(x.split(RAGGED), y.split(RAGGED), strict=True))


def ragged(world: lockstep.World, per_window: int) -> Weights:
    """One window after another over 64 samples in ragged micro-batches; each rank takes every
    W-th, whatever that leaves it.
    """
    model = everything()
    stepper = lockstep.Stepper(
        model, torch.optim.SGD(model.parameters(), lr=0.02), clip=0.1, unused="zeros"
    )
    share = per_window * world.size
    for start in range(0, len(RAGGED), share):
        window = batches()[start : start + share][world.rank :: world.size]
        for x, y in stepper.micro_batches(window):
            stepper.backward(zoo.loss_sum(model(x), y), weight=len(y))
        stepper.step()
    return zoo.weights(model)


def ragged_alone(share: int) -> Weights:
    """The same windows in plain torch."""
    model = everything()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    step = torch.optim.SGD(trained, lr=0.02)
    for start in range(0, len(RAGGED), share):
        window = batches()[start : start + share]
        step.zero_grad()
        for x, y in window:
            zoo.loss_sum(model(x), y).backward()
        count = sum(len(y) for _, y in window)
        for parameter in trained:
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            parameter.grad = gradient.to_dense() / count
        nn.utils.clip_grad_norm_(trained, 0.1)
        step.step()
    return zoo.weights(model)


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_any_ragged_split_of_64_samples_is_one_process(workers: int) -> None:
    for per_window in (1, 2, 5):
        expected = ragged_alone(per_window * workers)
        for rank in on_team(ragged, workers, args=(per_window,)):
            compare(rank, expected)
