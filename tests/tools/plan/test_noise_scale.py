"""The noise scale of problems on which it is known; and the sentences."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lockstep.config.task import Task
from lockstep.tools.plan.noise_scale import NoiseScale, Norms, estimate, noise_scale_of, norms_of
from tests.refused import refused

DEVIATIONS = torch.linspace(0.5, 2.0, 10)


class Quadratic(nn.Module):
    """Loss (w - x)^2 / 2 with x from N(0, diag(DEVIATIONS^2)): a sample's gradient is w - x, the
    true one w, its covariance x's.
    """

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.full((10,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return (self.w - x).square().sum(1).mean() / 2


def step(model: Quadratic, micro_batch: int, micro_batches: int) -> Norms:
    def loss(x: Tensor) -> Callable[[], Tensor]:
        return lambda: model(x)

    return norms_of(
        model, [loss(torch.randn(micro_batch, 10) * DEVIATIONS) for _ in range(micro_batches)]
    )


@pytest.mark.parametrize(("micro_batch", "micro_batches"), [(1, 8), (4, 8), (4, 2)])
def test_both_estimates_are_unbiased(micro_batch: int, micro_batches: int) -> None:
    torch.manual_seed(3)
    model = Quadratic()
    found = estimate(
        [step(model, micro_batch, micro_batches) for _ in range(300)],
        micro_batch=micro_batch,
        global_batch=micro_batch * micro_batches,
    )
    variance, squared = float(DEVIATIONS.square().sum()), 10 * 0.25
    assert found.variance == pytest.approx(variance, rel=0.1)
    assert found.squared == pytest.approx(squared, rel=0.25)
    assert found.samples is not None
    assert abs(found.samples - variance / squared) < 3 * found.error * found.samples
    assert 0 < found.error < 0.2


def test_norms_are_those_of_the_mean_gradients() -> None:
    model = Quadratic()
    xs = [torch.zeros(2, 10), torch.ones(2, 10)]  # gradients 0.5 and -0.5 in each element
    found = norms_of(model, [lambda x=x: model(x) for x in xs])  # type: ignore[misc]
    assert (found.small, found.big) == (2.5, 0.0)
    assert model.w.grad is not None
    assert torch.equal(model.w.grad, torch.zeros(10))


def test_an_exact_solution() -> None:
    """|G|^2 = 3 and tr S = 20: norms 3 + 20/4 and 3 + 20/16."""
    found = estimate([Norms(8.0, 4.25)] * 3, micro_batch=4, global_batch=16)
    assert (found.squared, found.variance) == pytest.approx((3.0, 20.0))
    assert found.samples == pytest.approx(20 / 3)
    assert found.error == pytest.approx(0.0)
    assert found.as_json()["samples"] == pytest.approx(20 / 3)


def test_a_gradient_hidden_by_noise_is_not_a_number() -> None:
    found = estimate([Norms(8.0, 1.5)] * 2, micro_batch=4, global_batch=16)
    assert found.squared < 0
    assert found.samples is None
    assert found.as_json()["relative_error"] is None
    assert "noise (from 2 steps of 16 samples in micro-batches of 4)" in found.describe()
    assert "a batch of 16" in found.describe()


def test_the_sentence() -> None:
    found = NoiseScale(
        squared=0.5, variance=100.0, error=0.25, steps=40, micro_batch=4, global_batch=16
    )
    assert "gradient noise scale 200 samples, +- 25 % (from 40 steps" in found.describe()
    assert found.describe().endswith(
        "beyond a global batch of about 2e+02 more workers stop helping"
    )
    none = NoiseScale(
        squared=0.5, variance=0.0, error=math.inf, steps=40, micro_batch=4, global_batch=16
    )
    assert "no noise was found" in none.describe()


def task(global_batch: int = 16, samples: int = 64) -> Task:
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(samples, 10) * DEVIATIONS)
    return Task(
        model=Quadratic,
        train_data=data,
        loss=lambda output, batch: (output * len(batch[0]), len(batch[0])),
        # it stays where the noise scale is known
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.0),
        global_batch=global_batch,
        micro_batch=4,
        epochs=50,
    )


def test_of_a_task() -> None:
    found = noise_scale_of(task, steps=60)
    assert (found.steps, found.micro_batch, found.global_batch) == (60, 4, 16)
    # of 64 samples, not of their distribution
    assert found.variance == pytest.approx(float(DEVIATIONS.square().sum()), rel=0.3)
    assert found.samples is not None


@pytest.mark.parametrize(
    ("given", "steps", "code", "values"),
    [
        ({"global_batch": 4}, 10, "noise-scale-batches", {"global_batch": 4, "micro_batch": 4}),
        ({"global_batch": 10}, 10, "noise-scale-batches", {"global_batch": 10, "micro_batch": 4}),
        ({}, 1, "not-a-whole-number", {"name": "steps", "value": 1}),
        ({}, 0, "not-a-whole-number", {"name": "steps", "value": 0}),
    ],
)
def test_what_cannot_be_measured(
    given: dict[str, int], steps: int, code: str, values: dict[str, object]
) -> None:
    with refused(code, **values):
        noise_scale_of(partial(task, **given), steps=steps)
