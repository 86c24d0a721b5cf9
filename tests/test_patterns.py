"""Training loops that are not `loss(model(x))`: each gives the same weights on several ranks as
on one.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import TensorDataset

import lockstep
from lockstep.testing import run_ranks
from tests import zoo

pytestmark = pytest.mark.rest

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


def weights(*models: nn.Module) -> Weights:
    return [parameter.detach().clone() for model in models for parameter in model.parameters()]


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
    return weights(make, judge)


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
    return weights(model)


def shared_forward(world: lockstep.World) -> Weights:
    """One forward of the body feeds two heads' losses; one backward."""
    torch.manual_seed(1)
    model = nn.ModuleDict({"body": nn.Linear(6, 8), "a": nn.Linear(8, 3), "b": nn.Linear(8, 6)})
    stepper = lockstep.Stepper(model, sgd(model))
    for epoch in loader().epochs(2):
        for window in epoch:
            for x, y in stepper.micro_batches(window):
                features = torch.tanh(model["body"](x))
                stepper.backward(
                    zoo.loss_sum(model["a"](features), y)
                    + (model["b"](features) - x).square().sum(),
                    weight=len(y),
                )
            stepper.step()
    return weights(model)


def gradient_penalty(world: lockstep.World) -> Weights:
    """A backward through the gradient of the inputs."""
    model = zoo.build("mlp")
    stepper = lockstep.Stepper(model, sgd(model, lr=0.01))
    for epoch in loader().epochs(2):
        for window in epoch:
            for x, y in stepper.micro_batches(window):
                x = x.clone().requires_grad_()
                output = model(x)
                (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
                stepper.backward(zoo.loss_sum(output, y) + slope.square().sum(), weight=len(y))
            stepper.step()
    return weights(model)


def moving_average(world: lockstep.World) -> Weights:
    """A copy that follows the weights: equal on all ranks because they are."""
    model = zoo.build("mlp")
    average = copy.deepcopy(model)
    stepper = lockstep.Stepper(model, sgd(model))
    for epoch in loader().epochs(2):
        for window in epoch:
            for x, y in stepper.micro_batches(window):
                stepper.backward(zoo.loss_sum(model(x), y), weight=len(y))
            stepper.step()
            with torch.no_grad():
                for slow, fast in zip(average.parameters(), model.parameters(), strict=True):
                    slow.lerp_(fast, 0.1)
    return weights(model, average)


class Chained(torch.optim.Optimizer):
    """Of the guide (windows.md): several optimizers that step together; groups and state are
    theirs.
    """

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self.optimizers = optimizers
        super().__init__([group for each in optimizers for group in each.param_groups], {})
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
    for epoch in loader().epochs(2):
        state = stepper.optimizer_state_dict()
        stepper = stepper_of()
        stepper.load_optimizer_state_dict(state)
        for window in epoch:
            for x, y in stepper.micro_batches(window):
                stepper.backward(zoo.loss_sum(model(x), y), weight=len(y))
            if stepper.step().applied:
                average.update_parameters(model)
    assert len(stepper.optimizer_state_dict()["state"]) == 6
    return weights(model, average.module)


class Adapted(nn.Module):
    """A frozen layer with a low-rank addition that is trained."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner.requires_grad_(False)
        self.down = nn.Linear(inner.in_features, 2, bias=False)
        self.up = nn.Linear(2, inner.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + self.up(self.down(x))


def adapters(world: lockstep.World) -> Weights:
    """Low-rank adapters put in before training."""
    model = zoo.build("mlp")
    assert isinstance(model, nn.Sequential)
    for number in (0, 2, 4):
        model[number] = Adapted(model[number])  # type: ignore[arg-type]
    stepper = lockstep.Stepper(model, sgd(model))
    for epoch in loader().epochs(2):
        for window in epoch:
            for x, y in stepper.micro_batches(window):
                stepper.backward(zoo.loss_sum(model(x), y), weight=len(y))
            stepper.step()
    return weights(model)


PATTERNS: list[Callable[[lockstep.World], Weights]] = [
    gan,
    inner_steps,
    shared_forward,
    gradient_penalty,
    moving_average,
    two_optimizers,
    adapters,
]


@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda pattern: pattern.__name__)
def test_a_pattern_does_not_depend_on_the_number_of_ranks(
    pattern: Callable[[lockstep.World], Weights],
) -> None:
    (alone,) = run_ranks(pattern, 1)
    for workers in (2, 3):
        for found in run_ranks(pattern, workers):
            for ours, theirs in zip(found, alone, strict=True):
                assert zoo.distance(ours, theirs) < 1e-6


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
    return applied, scales, weights(model)


def test_an_inf_on_one_rank_skips_the_step_on_all_with_equal_scalers() -> None:
    first, second = run_ranks(overflow, 2)
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


def ragged(
    world: lockstep.World, per_window: int, clip: float | None, dtype: torch.dtype
) -> Weights:
    """One window after another over 64 samples in ragged micro-batches; each rank takes every
    W-th, whatever that leaves it.
    """
    model = everything().to(dtype)
    stepper = lockstep.Stepper(
        model, torch.optim.SGD(model.parameters(), lr=0.02), clip=clip, unused="zeros"
    )
    x, y = zoo.samples(64)
    batches = list(zip(x.to(dtype).split(RAGGED), y.split(RAGGED), strict=True))
    share = per_window * world.size
    for start in range(0, len(batches), share):
        for u, v in stepper.micro_batches(batches[start : start + share][world.rank :: world.size]):
            stepper.backward(zoo.loss_sum(model(u), v), weight=len(v))
        stepper.step()
    return weights(model)


def ragged_alone(window: int, clip: float | None, dtype: torch.dtype) -> Weights:
    """The same windows in plain torch; gradients are summed in float64 where the parameters are
    not float32.
    """
    torch.set_num_threads(1)
    model = everything().to(dtype)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    step = torch.optim.SGD(trained, lr=0.02)
    x, y = zoo.samples(64)
    batches = list(zip(x.to(dtype).split(RAGGED), y.split(RAGGED), strict=True))
    for start in range(0, len(batches), window):
        sums = [torch.zeros_like(parameter, dtype=torch.float64) for parameter in trained]
        for u, v in batches[start : start + window]:
            step.zero_grad()
            zoo.loss_sum(model(u), v).backward()
            for total, parameter in zip(sums, trained, strict=True):
                if parameter.grad is not None:
                    total += (
                        parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
                    ).double()
        count = sum(len(v) for _, v in batches[start : start + window])
        for total, parameter in zip(sums, trained, strict=True):
            parameter.grad = (total / count).to(dtype)
        if clip is not None:
            nn.utils.clip_grad_norm_(trained, clip)
        step.step()
    return weights(model)


@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("per_window", [1, 2, 5])
@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_any_ragged_split_of_64_samples_is_one_process(
    workers: int, per_window: int, clip: float | None
) -> None:
    expected = ragged_alone(per_window * workers, clip, torch.float32)
    for found in run_ranks(ragged, workers, args=(per_window, clip, torch.float32)):
        for ours, theirs in zip(found, expected, strict=True):
            assert zoo.distance(ours, theirs) < 1e-6


@pytest.mark.parametrize("workers", [2, 3])
def test_bfloat16_parameters_stay_within_their_rounding(workers: int) -> None:
    expected = ragged_alone(2 * workers, None, torch.bfloat16)
    for found in run_ranks(ragged, workers, args=(2, None, torch.bfloat16)):
        for ours, theirs in zip(found, expected, strict=True):
            assert zoo.distance(ours, theirs) < 1e-2
