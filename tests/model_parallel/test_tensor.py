"""What is said of a plan that cannot be followed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from lockstep.config.mesh import Mesh
from lockstep.errors import TaskError
from lockstep.model_parallel.split_form import device_mesh
from lockstep.model_parallel.tensor import fits, split_tensors
from tests.model_parallel.cut_models import build
from tests.refused import refused


@pytest.fixture
def two() -> Any:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield device_mesh(Mesh(tensor=2), "cpu")["tensor"]
    dist.destroy_process_group()


def test_a_star_is_one_part_of_a_name() -> None:
    assert fits("blocks.*.mixed", "blocks.0.mixed")
    assert fits("blocks.*.layer.0", "blocks.11.layer.0")
    assert not fits("blocks.*", "blocks.0.mixed")
    assert not fits("*.mixed", "blocks.0.mixed")
    assert not fits("blocks.*.layer.0", "blocks.0.layer.2")
    assert fits("0", "0")


BOTH = {"0": "colwise", "2": "rowwise"}
Case = tuple[Callable[[], nn.Module], dict[str, str], dict[str, Any], str, dict[str, Any]]
WRONG: dict[str, Case] = {
    "no plan": (lambda: build("mlp"), {}, {}, "tensor-plan-missing", {"count": 2}),
    "no module": (
        lambda: build("gpt"),
        {"blocks.*.mixd": "rowwise"},
        {},
        "pattern-fits-nothing",
        {
            "pattern": "blocks.*.mixd",
            "near": ["blocks.0.mixed", "blocks.1.heads", "blocks.1.mixed"],
        },
    ),
    "no linear": (
        lambda: build("mlp"),
        {**BOTH, "3": "colwise"},
        {},
        "layer-cannot-be-cut",
        {"layer": "3", "kind": "LayerNorm"},
    ),
    "outputs": (
        lambda: nn.Sequential(nn.Linear(4, 5), nn.GELU(), nn.Linear(5, 4)),
        BOTH,
        {},
        "not-equal-parts",
        {"count": 2, "name": "0 (colwise)", "size": 5, "what": "outputs"},
    ),
    "inputs": (
        lambda: nn.Sequential(nn.Linear(5, 4), nn.GELU(), nn.Linear(5, 4)),
        BOTH,
        {},
        "not-equal-parts",
        {"count": 2, "name": "2 (rowwise)", "size": 5, "what": "inputs"},
    ),
    "two styles": (
        lambda: build("mlp"),
        {**BOTH, "*": "rowwise"},
        {},
        "pattern-conflict",
        {
            "layer": "0",
            "first": "0",
            "first_style": "colwise",
            "second": "*",
            "second_style": "rowwise",
        },
    ),
    "never put together": (
        lambda: build("mlp"),
        {"0": "colwise"},
        {},
        "colwise-without-rowwise",
        {},
    ),
    "heads": (
        lambda: build("gpt"),
        {"blocks.*.mixed": "rowwise"},
        {"heads": 3},
        "not-equal-parts",
        {"count": 2, "name": "the model", "size": 3, "what": "attention heads"},
    ),
    "tied": (
        lambda: build("odd"),
        {"blocks.0": "colwise", "last": "rowwise"},
        {},
        "tied-layers-in-plan",
        {"names": "blocks.0.weight and tied.weight"},
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_plan_is_said(case: str, two: DeviceMesh) -> None:
    make, plan, options, code, values = WRONG[case]
    module = make()
    before = {name: type(parameter) for name, parameter in module.named_parameters()}
    with refused(code, TaskError, **values):
        split_tensors(module, plan, two, **options)
    assert before == {name: type(parameter) for name, parameter in module.named_parameters()}


@pytest.mark.parametrize(
    ("plan", "layer", "width", "got", "why"),
    [
        ({"0": "rowwise", "2": "colwise"}, "0", 3, 6, "it is rowwise"),
        ({"0": "colwise", "4": "rowwise"}, "2", 16, 8, "a colwise layer before it"),
        ({"0": "colwise", "2": "colwise", "4": "rowwise"}, "2", 16, 8, "a colwise layer before it"),
    ],
)
def test_layers_that_do_not_follow_each_other_are_named_in_the_first_forward(
    plan: dict[str, str], layer: str, width: int, got: int, why: str, two: DeviceMesh
) -> None:
    module = build("mlp")
    split_tensors(module, plan, two)
    with refused("layer-width-differs", TaskError, layer=layer, width=width, got=got) as caught:
        module(torch.randn(2, 6))
    assert caught.value.values["why"].startswith(why)


def test_some_of_the_layers_follow_a_plan_for_all(two: DeviceMesh) -> None:
    whole = build("mlp")
    names = {name for name, _ in whole.named_modules()}
    part = nn.Sequential()
    part.add_module("2", whole[2])
    split_tensors(part, BOTH, two, names=names)
    assert part[0].weight.to_local().shape == (6, 8)
    with refused("pattern-fits-nothing", TaskError, pattern="7"):
        split_tensors(part, {**BOTH, "7": "colwise"}, two, names=names)
