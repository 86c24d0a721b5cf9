"""Achieved rates against the published throughputs that they come from."""

from __future__ import annotations

import statistics

import pytest

from lockstep.tools.plan.model_table import DEVICES, MODELS, Family, device_named, resnet
from tests.refused import refused

FLOPS = {name: model.flops for name, model in MODELS.items()} | {
    "resnet152": sum(layer.flops for layer in resnet((3, 8, 36, 3)))
}


@pytest.mark.parametrize(
    ("device", "family", "published"),
    [
        ("p100", "convolutional", {"inception-v3": 142, "resnet50": 219, "resnet152": 91.8}),
        ("p100", "plain convolutional", {"vgg16": 154}),
        ("v100", "convolutional", {"resnet50": 1156}),
        ("rtx4090", "convolutional", {"resnet50": 1776, "inception-v3": 1340}),
        ("a100-80g", "convolutional", {"resnet50": 2470}),
    ],
)
def test_rates_are_the_median_of_published_throughputs(
    device: str, family: Family, published: dict[str, float]
) -> None:
    rates = [3 * FLOPS[name] * throughput for name, throughput in published.items()]
    assert DEVICES[device].achieved[family] == pytest.approx(statistics.median(rates), rel=0.03)


def test_only_fast_convolutions_beat_the_peak() -> None:
    for device in DEVICES.values():
        peak = device.half if device.mixed else device.fp32
        slow = [rate for family, rate in device.achieved.items() if family != "plain convolutional"]
        assert all(rate < 0.7 * peak for rate in slow)


def test_an_unknown_device_lists_the_known() -> None:
    known = ["p100", "v100", "rtx4090", "a100-80g", "h100", "h200"]
    with refused("unknown-choice", name="device", value="b200", choices=known):
        device_named("b200")
