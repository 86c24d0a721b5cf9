"""FLOPs against products of shapes; and a model is left as it was found."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lockstep.tools.timing.profiler import counted
from tests.refused import refused


def test_flops_are_those_of_the_products() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    batch = torch.randn(5, 8)
    forward = 2 * 5 * (8 * 16 + 16 * 4)
    weights = forward  # of the backward: one product for each weight
    # and one for the input of the second layer; nobody asks for that of the first
    inputs = 2 * 5 * 16 * 4
    assert counted(model, lambda: model(batch).sum()).flops == forward + weights + inputs


def test_a_convolution_is_counted() -> None:
    model = nn.Conv2d(3, 7, 3, padding=1)
    batch = torch.randn(2, 3, 10, 10)
    assert counted(model, lambda: model(batch).sum()).flops == 2 * (2 * 2 * 100 * 27 * 7)


def test_elementwise_work_is_not() -> None:
    model = nn.BatchNorm1d(4)
    found = counted(model, lambda: model(torch.randn(5, 4)).sum())
    assert found.flops == 0
    assert found.forward + found.backward > 0


def test_the_model_and_the_random_stream_are_left_as_they_were() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout())
    kept = torch.ones(4, 4)
    model[0].weight.grad = kept
    before = {name: value.clone() for name, value in model.state_dict().items()}
    stream = torch.get_rng_state()
    counted(model, lambda: model(torch.randn(8, 4)).sum())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model[0].weight.grad is kept
    assert torch.equal(kept, torch.ones(4, 4))
    assert model[0].bias.grad is None
    assert torch.equal(torch.get_rng_state(), stream)


def test_gradients_land_from_the_last_layer_to_the_first() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 1))
    unused = nn.Linear(2, 2)
    model.add_module("unused", unused)
    landed = counted(model, lambda: model[2](model[1](model[0](torch.randn(256, 64)))).sum()).landed
    first, second, third = landed[0], landed[2], landed[4]
    assert 0 < third < second < first < 1
    assert landed[6:] == [1.0, 1.0]


@pytest.mark.parametrize(
    ("loss", "code", "values"),
    [
        (lambda output: output, "loss-not-a-number", {"what": "a tensor of shape (3, 2)"}),
        (lambda output: 1.0, "loss-not-a-number", {"what": "a float"}),
        (lambda output: output.sum().detach(), "loss-without-parameters", {}),
    ],
)
def test_a_loss_that_cannot_be_differentiated(loss, code, values) -> None:  # type: ignore[no-untyped-def]
    model = nn.Linear(2, 2)
    with refused(code, **values):
        counted(model, lambda: loss(model(torch.ones(3, 2))))
