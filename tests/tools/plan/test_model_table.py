"""The table of models: sizes and work against published numbers.

Achieved rates against the published throughputs that they come from.
"""

from __future__ import annotations

import statistics

import pytest

from lockstep.tools.plan.model_table import (
    DEVICES,
    MODELS,
    Family,
    device_named,
    model_named,
    resnet,
)
from tests.refused import refused


@pytest.mark.parametrize(
    ("name", "parameters"),
    [  # torchvision's and transformers' own counts; BERT without the pooler, 1,049,600
        ("resnet50", 25_557_032),
        ("resnet101", 44_549_160),
        ("inception-v3", 23_834_568),  # 27,161,264 with the auxiliary head
        ("vgg16", 138_357_544),
        ("bert-large", 335_141_888 - 1_049_600),
        ("gpt2-xl", 1_557_611_200),
        ("llama-8b", 8_030_261_248),
    ],
)
def test_parameters_to_the_last_one(name: str, parameters: int) -> None:
    assert MODELS[name].parameters == parameters


@pytest.mark.parametrize(("name", "parameters"), [("gpt3-175b", 174.6e9), ("palm-540b", 540.35e9)])
def test_parameters_of_models_that_were_not_released(name: str, parameters: float) -> None:
    assert MODELS[name].parameters == pytest.approx(parameters, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "additions"),
    [("resnet50", 4.09e9), ("resnet101", 7.80e9), ("inception-v3", 5.71e9), ("vgg16", 15.47e9)],
)
def test_multiply_adds_as_torchvision_lists_them(name: str, additions: float) -> None:
    assert MODELS[name].flops == pytest.approx(2 * additions, rel=3e-3)


@pytest.mark.parametrize("name", ["gpt2-xl", "gpt3-175b", "palm-540b"])
def test_two_flops_a_parameter_and_token_and_some_for_attention(name: str) -> None:
    model = MODELS[name]
    assert 1.0 < model.flops / model.tokens / (2 * model.parameters) < 1.12


def test_vgg_frees_most_of_its_parameters_at_the_begin_of_the_backward() -> None:
    last = MODELS["vgg16"].layers[-3:]
    assert sum(layer.parameters for layer in last) > 0.89 * MODELS["vgg16"].parameters
    assert sum(layer.flops for layer in last) < 0.01 * MODELS["vgg16"].flops


def test_an_unknown_model_lists_the_known() -> None:
    assert model_named("VGG16") is MODELS["vgg16"]
    with refused("unknown-choice", name="model", value="vgg19", choices=list(MODELS)):
        model_named("vgg19")


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
