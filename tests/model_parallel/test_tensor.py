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
from lockstep.config.parts import Parts
from lockstep.errors import TaskError
from lockstep.model_parallel.split_form import device_mesh
from lockstep.model_parallel.tensor import fits, plan_of, split_tensors
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
            "near": ["blocks.1.mixed", "blocks.0.mixed", "blocks.1.heads"],
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
        {"count": 2, "name": "0 (colwise)", "size": 5},
    ),
    "inputs": (
        lambda: nn.Sequential(nn.Linear(5, 4), nn.GELU(), nn.Linear(5, 4)),
        BOTH,
        {},
        "not-equal-parts",
        {"count": 2, "name": "2 (rowwise)", "size": 5},
    ),
    "two styles": (
        lambda: build("mlp"),
        {**BOTH, "*": "rowwise"},
        {},
        "pattern-conflict",
        {"layer": "0", "pattern": "*"},
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
        {"count": 2, "name": "attention heads", "size": 3},
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
def test_a_wrong_plan_is_said(case: str) -> None:
    make, plan, options, code, values = WRONG[case]
    with refused(code, TaskError, **values):
        plan_of(make(), Parts(tensor=plan, **options), 2)


@pytest.mark.parametrize(
    "plan",
    [
        {"0": "rowwise", "2": "colwise"},
        {"0": "colwise", "4": "rowwise"},
        {"0": "colwise", "2": "colwise", "4": "rowwise"},
    ],
)
def test_layers_that_do_not_follow_each_other_fail_in_the_first_forward(
    plan: dict[str, str], two: DeviceMesh
) -> None:
    """torch names the sizes that do not fit; a wrong result is impossible."""
    module = build("mlp")
    split_tensors(module, plan_of(module, Parts(tensor=plan), 2), two)
    with pytest.raises(RuntimeError):
        module(torch.randn(2, 6))


def test_a_part_of_the_model_follows_the_plan_of_all(two: DeviceMesh) -> None:
    whole = build("mlp")
    part = nn.Sequential()
    part.add_module("2", whole[2])
    split_tensors(part, plan_of(whole, Parts(tensor=BOTH), 2), two)
    assert part[0].weight.to_local().shape == (6, 8)
