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
from lockstep.model_parallel.mesh_devices import device_mesh
from lockstep.model_parallel.tensor import fits, split_tensors
from tests.model_parallel.cut_models import build


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
WRONG: dict[str, tuple[Callable[[], nn.Module], dict[str, str], dict[str, Any], str]] = {
    "no plan": (
        lambda: build("mlp"),
        {},
        {},
        (
            r"tensor=2, but the task does not say which layers can be cut: give it"
            r" parts=Parts\(tensor="
        ),
    ),
    "no module": (
        lambda: build("gpt"),
        {"blocks.*.mixd": "rowwise"},
        {},
        r"Parts.tensor\['blocks.\*.mixd'\] fits no module of the model; near it: blocks.0.mixed",
    ),
    "no linear": (
        lambda: build("mlp"),
        {**BOTH, "3": "colwise"},
        {},
        "Parts.tensor: 3 is a LayerNorm; only nn.Linear and nn.Embedding can be cut",
    ),
    "outputs": (
        lambda: nn.Sequential(nn.Linear(4, 5), nn.GELU(), nn.Linear(5, 4)),
        BOTH,
        {},
        (
            r"tensor=2: 0 \(colwise\) has 5 outputs, which 2 ranks cannot share equally: choose a"
            r" divisor of 5"
        ),
    ),
    "inputs": (
        lambda: nn.Sequential(nn.Linear(5, 4), nn.GELU(), nn.Linear(5, 4)),
        BOTH,
        {},
        r"tensor=2: 2 \(rowwise\) has 5 inputs",
    ),
    "two styles": (
        lambda: build("mlp"),
        {**BOTH, "*": "rowwise"},
        {},
        r"Parts.tensor: 0 is colwise by '0' and rowwise by '\*'",
    ),
    "never put together": (
        lambda: build("mlp"),
        {"0": "colwise"},
        {},
        "has colwise layers and no rowwise one",
    ),
    "heads": (
        lambda: build("gpt"),
        {"blocks.*.mixed": "rowwise"},
        {"heads": 3},
        "tensor=2: the model has 3 attention heads, .* choose a divisor of 3",
    ),
    "tied": (
        lambda: build("odd"),
        {"blocks.0": "colwise", "last": "rowwise"},
        {},
        "blocks.0.weight and tied.weight are one tensor",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_plan_is_said(case: str, two: DeviceMesh) -> None:
    make, plan, options, message = WRONG[case]
    module = make()
    before = {name: type(parameter) for name, parameter in module.named_parameters()}
    with pytest.raises(TaskError, match=message):
        split_tensors(module, plan, two, **options)
    assert before == {name: type(parameter) for name, parameter in module.named_parameters()}


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (
            {"0": "rowwise", "2": "colwise"},
            (
                "Parts.tensor: 0 takes 3 columns on this rank, and was given 6; it is rowwise and"
                " takes what a colwise layer gives"
            ),
        ),
        (
            {"0": "colwise", "4": "rowwise"},
            (
                "Parts.tensor: 2 takes 16 columns on this rank, and was given 8; a colwise layer"
                " before it gives each rank a share"
            ),
        ),
        (
            {"0": "colwise", "2": "colwise", "4": "rowwise"},
            (
                "Parts.tensor: 2 takes 16 columns on this rank, and was given 8; a colwise layer"
                " before it gives each rank a share"
            ),
        ),
    ],
)
def test_layers_that_do_not_follow_each_other_are_named_in_the_first_forward(
    plan: dict[str, str], message: str, two: DeviceMesh
) -> None:
    module = build("mlp")
    split_tensors(module, plan, two)
    with pytest.raises(TaskError, match=message):
        module(torch.randn(2, 6))


def test_some_of_the_layers_follow_a_plan_for_all(two: DeviceMesh) -> None:
    whole = build("mlp")
    names = {name for name, _ in whole.named_modules()}
    part = nn.Sequential()
    part.add_module("2", whole[2])
    split_tensors(part, BOTH, two, names=names)
    assert part[0].weight.to_local().shape == (6, 8)
    with pytest.raises(TaskError, match="fits no module"):
        split_tensors(part, {**BOTH, "7": "colwise"}, two, names=names)
