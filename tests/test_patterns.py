"""Training loops that are not `loss(model(x))`: each gives the same weights on several ranks as
on one. test_recipes.py has moving averages and adapters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import lockstep
from tests import zoo
from tests.step.walking import walk, walk_epochs
from tests.teams import on_team

Weights = list[Tensor]


def loader() -> lockstep.Loader:
    data = TensorDataset(*zoo.samples(36))
    return lockstep.Loader(data, global_batch=12, micro_batch=3, seed=3)


def sgd(model: nn.Module, lr: float = 0.05) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def compare(ours: Iterable[Tensor], theirs: Iterable[Tensor], bound: float = 1e-6) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert zoo.distance(one, other) < bound


def gan(world: lockstep.World) -> Weights:
    """Two models, two steppers, one window: the discriminator learns from it, then the
    generator, whose BatchNorm runs in both.
    """
    torch.manual_seed(1)
    make = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
    judge = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
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
    return [*zoo.weights(make, judge), *(buffer.clone() for buffer in make.buffers())]


def inner_steps(world: lockstep.World) -> Weights:
    """Three updates from one window."""
    model = zoo.build("mlp")
    stepper = lockstep.Stepper(model, sgd(model))
    for window in next(loader().epochs(1)):
        for _ in range(3):
            walk(stepper, window)
    return zoo.weights(model)


def gradient_penalty(world: lockstep.World) -> Weights:
    """A backward through the gradient of the inputs."""
    model = zoo.build("mlp")
    stepper = lockstep.Stepper(model, sgd(model, lr=0.01))
    for window in next(loader().epochs(1)):
        for x, y in stepper.micro_batches(window):
            inputs = x.clone().requires_grad_()
            output = model(inputs)
            (slope,) = torch.autograd.grad(output.sum(), inputs, create_graph=True)
            loss = zoo.loss_sum(output, y) + slope.square().sum()
            stepper.backward(loss, weight=len(y))
        stepper.step()
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
    """One model, matrices and vectors by optimizers of their own. The state goes to another Stepper
    on the way.
    """
    model = zoo.build("mlp")

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
        walk_epochs(stepper, loader(), 1)
    assert len(stepper.optimizer_state_dict()["state"]) == 6
    return zoo.weights(model)


@pytest.mark.parametrize(
    "pattern",
    [gan, inner_steps, gradient_penalty, two_optimizers],
    ids=lambda pattern: pattern.__name__,
)
def test_a_pattern_does_not_depend_on_the_number_of_ranks(
    pattern: Callable[[lockstep.World], Weights],
) -> None:
    (alone,) = on_team(pattern, 1)
    for workers in (2, 3):
        for rank in on_team(pattern, workers):
            compare(rank, alone)


RAGGED = [1, 7, 3, 12, 2, 9, 5, 4, 6, 11, 4]  # 64 samples


class Everything(nn.Module):
    """Frozen, unused, tied, scalar and sparsely used parameters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.awkward = zoo.Awkward()
        self.embed = nn.Embedding(40, 6, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.awkward(x + self.embed((x[:, 0].abs() * 12).long().clamp(max=39)))


def ragged(world: lockstep.World, window: int) -> Weights:
    """One window after another over 64 samples in ragged micro-batches; each rank takes every
    W-th, whatever that leaves it.
    """
    model = Everything()
    stepper = lockstep.Stepper(
        model, torch.optim.SGD(model.parameters(), lr=0.02), clip=0.1, unused="zeros"
    )
    x, y = zoo.samples(64)
    batches = list(zip(x.split(RAGGED), y.split(RAGGED), strict=True))
    for start in range(0, len(batches), window):
        local = batches[start : start + window][world.rank :: world.size]
        walk(stepper, local)
    return zoo.weights(model)


@pytest.mark.parametrize("window", [1, 3, 4, 10])
def test_any_ragged_split_of_64_samples_is_one_process(window: int) -> None:
    (alone,) = on_team(ragged, 1, (window,))
    for workers in (2, 3, 4):
        for rank in on_team(ragged, workers, (window,)):
            compare(rank, alone)


def test_what_an_earlier_window_has_computed_is_no_part_of_a_later_graph() -> None:
    with lockstep.init():
        make, judge = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)), nn.Linear(6, 1)
        maker, judger = lockstep.Stepper(make, sgd(make)), lockstep.Stepper(judge, sgd(judge))
        x = torch.randn(4, 6)
        for batch in maker.micro_batches([x]):
            fake = make(batch)
            maker.backward(judge(fake).sum(), weight=4)
        maker.step()
        fake = make(x)
        for _ in judger.micro_batches([x]):
            judger.backward(judge(fake.detach()).sum(), weight=4)
        judger.step()
        for _ in maker.micro_batches([x]):
            with pytest.raises(RuntimeError, match="inplace operation") as caught:
                maker.backward(judge(fake).square().sum(), weight=4)
        assert "compute it anew" in caught.value.__notes__[0]
