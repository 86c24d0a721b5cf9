"""Ratios worked out by hand from given times; and the public function on small models."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lockstep
from lockstep.schedules.network import Link
from lockstep.tools.bench.ratio import CommunicationRatio, sum_of
from tests.refused import refused

FOUR = CommunicationRatio(
    model="Linear",
    world_size=4,
    samples=10,
    parameters=1_000_000,
    gradient_bytes=4_000_000,
    flops=3 * 10**9,
    forward=1.0,
    backward=2.0,
    link_rate=1e6,
    link_latency=0.0,
)


def test_the_sizes_and_the_ratio() -> None:
    assert FOUR.bytes_sent == 6_000_000  # 2 (W - 1) / W
    assert (FOUR.computation, FOUR.communication) == (3.0, 6.0)
    assert (FOUR.ratio, FOUR.significant) == (2.0, True)
    assert FOUR.exposed == 4.0  # the backward hides two seconds
    assert FOUR.device_rate == 1e9
    # latency counts for every message
    assert replace(FOUR, link_latency=0.5, link_rate=float("inf")).communication == 2 * 3 * 0.5
    # the limit is a tenth
    assert not replace(FOUR, forward=58.0).significant
    assert replace(FOUR, forward=57.9).significant
    assert "= 2: significant" in FOUR.describe()

    free, alone = replace(FOUR, link_rate=float("inf")), replace(FOUR, world_size=1)
    assert (free.communication, free.significant, free.bytes_sent) == (0.0, False, 6_000_000)
    assert (alone.communication, alone.significant, alone.bytes_sent) == (0.0, False, 0.0)


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 2)

    def forward(self, x: Tensor, more: Tensor) -> dict[str, Any]:
        return {"output": self.layer(x) + more, "index": torch.arange(3), "note": "text"}


def test_a_batch_is_what_the_model_is_called_with() -> None:
    x, more = torch.randn(7, 6), torch.randn(7, 2)
    for batch in ((x, more), [x, more], {"x": x, "more": more}):
        ratio = lockstep.communication_ratio(Both(), batch, 2, network="1Gbit")
        assert (ratio.samples, ratio.flops, ratio.bytes_sent) == (7, 2 * 2 * 7 * 6 * 2, 56)
    single = lockstep.communication_ratio(
        nn.Linear(6, 2), x, 2, network=Link(0.5, 100.0), loss=lambda output: output.square().mean()
    )
    assert single.flops == 2 * 2 * 7 * 6 * 2
    assert single.communication == 2 * 0.5 + 56 / 100
    assert single.forward > 0
    assert single.backward > 0


def test_narrow_parameters_send_less_and_frozen_ones_nothing() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 2)).to(torch.bfloat16)
    model[0].requires_grad_(False)
    ratio = lockstep.communication_ratio(model, torch.ones(3, 6, dtype=torch.bfloat16), 2)
    assert (ratio.parameters, ratio.gradient_bytes) == (14, 28)
    elementwise = lockstep.communication_ratio(nn.BatchNorm1d(4), torch.randn(5, 4), 2)
    assert (elementwise.flops, elementwise.device_rate) == (0, None)


def test_the_model_and_the_random_stream_are_left_as_they_were() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout())
    kept = torch.ones(4, 4)
    model[0].weight.grad = kept
    before = {name: value.clone() for name, value in model.state_dict().items()}
    batch = torch.randn(8, 4)
    stream = torch.get_rng_state()
    lockstep.communication_ratio(model, batch, 2)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model[0].weight.grad is kept
    assert torch.equal(kept, torch.ones(4, 4))
    assert model[0].bias.grad is None
    assert torch.equal(torch.get_rng_state(), stream)


@pytest.mark.parametrize(
    ("batch", "options", "code", "values"),
    [
        ([], {}, "batch-without-tensors", {"kind": "list"}),
        (torch.ones(0, 6), {}, "batch-without-tensors", {"kind": "Tensor"}),
        (torch.ones(3, 6), {"world_size": 0}, "wrong-value", {"name": "world_size"}),
        (torch.ones(3, 6), {"network": "7"}, "unknown-choice", {"value": "7"}),
        (torch.ones(3, 6), {"network": 7}, "wrong-value", {"value": 7}),
        (torch.ones(3, 6), {"loss": lambda output: output}, "loss-not-a-number", {}),
        (torch.ones(3, 6), {"loss": lambda x: x.sum().detach()}, "loss-without-parameters", {}),
    ],
)
def test_questions_that_cannot_be_answered(
    batch: Any, options: dict[str, Any], code: str, values: dict[str, Any]
) -> None:
    with refused(code, **values):
        lockstep.communication_ratio(nn.Linear(6, 2), batch, **{"world_size": 2, **options})
    with refused("no-trainable-parameter"):
        lockstep.communication_ratio(nn.ReLU(), torch.ones(3, 6), 2)
    with refused("output-without-tensor", kind="str"):
        sum_of("text")
