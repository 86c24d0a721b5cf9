"""What is said of a plan that cannot be followed."""

from __future__ import annotations

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


@pytest.mark.parametrize(
    ("pattern", "name", "fit"),
    [
        ("blocks.*.mixed", "blocks.0.mixed", True),
        ("blocks.*.layer.0", "blocks.11.layer.0", True),
        ("blocks.*", "blocks.0.mixed", False),
        ("*.mixed", "blocks.0.mixed", False),
        ("blocks.*.layer.0", "blocks.0.layer.2", False),
    ],
)
def test_a_star_is_one_part_of_a_name(pattern: str, name: str, fit: bool) -> None:
    assert fits(pattern, name) == fit


BOTH = {"0": "colwise", "2": "rowwise"}
Case = tuple[str, dict[str, str], str, dict[str, Any]]


MIXD, NEAR = "blocks.*.mixd", ["blocks.1.mixed", "blocks.0.mixed", "blocks.1.heads"]
WRONG: dict[str, Case] = {
    "no plan": ("mlp", {}, "tensor-plan-missing", {"count": 2}),
    "no module": (
        "gpt",
        {MIXD: "rowwise"},
        "pattern-fits-nothing",
        {"pattern": MIXD, "near": NEAR},
    ),
    "no linear": ("mlp", {**BOTH, "3": "colwise"}, "layer-cannot-be-cut", {"layer": "3"}),
    "two styles": ("mlp", {**BOTH, "*": "rowwise"}, "pattern-conflict", {"layer": "0"}),
    "never put together": ("mlp", {"0": "colwise"}, "colwise-without-rowwise", {}),
    "tied": (
        "odd",
        {"blocks.0": "colwise", "last": "rowwise"},
        "tied-layers-in-plan",
        {"names": "blocks.0.weight and tied.weight"},
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_plan_is_said(case: str) -> None:
    model, plan, code, values = WRONG[case]
    with refused(code, TaskError, **values):
        plan_of(build(model), Parts(tensor=plan), 2)


def test_sizes_and_heads_that_cannot_be_cut_are_said() -> None:
    for first, name in (((4, 5), "0 (colwise)"), ((5, 4), "2 (rowwise)")):
        model = nn.Sequential(nn.Linear(*first), nn.GELU(), nn.Linear(5, 4))
        with refused("not-equal-parts", TaskError, count=2, name=name, size=5):
            plan_of(model, Parts(tensor=BOTH), 2)
    parts = Parts(tensor={"blocks.*.mixed": "rowwise"}, heads=3)
    with refused("not-equal-parts", TaskError, count=2, name="attention heads", size=3):
        plan_of(build("gpt"), parts, 2)


@pytest.mark.parametrize(
    "plan",
    [{"0": "rowwise", "2": "colwise"}, {"0": "colwise", "2": "colwise", "4": "rowwise"}],
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
