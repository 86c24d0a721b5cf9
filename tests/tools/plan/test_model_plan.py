"""Plans of models from the table: layouts, ranks, sentences."""

from __future__ import annotations

import json
from typing import Any

import pytest

from lockstep.config.mesh import Mesh
from lockstep.config.parallelism import Parallelism
from lockstep.tools.plan.model_plan import layouts, name_of, plan_model, work_of_model
from lockstep.tools.plan.model_table import DEVICES, MODELS
from lockstep.tools.plan.networks import nvlink, pcie
from tests.refused import refused

P100, A100 = DEVICES["p100"], DEVICES["a100-80g"]
SLOW, QUICK = pcie(4, gbit=25), nvlink(8, gigabytes=300, gbit=1600)


def test_work_is_that_of_the_tables() -> None:
    model = MODELS["vgg16"]
    work = work_of_model(model, P100, batch=64)
    assert work.computation == pytest.approx(64 / 154, rel=0.01)  # the published throughput
    assert work.backward == 2 * work.forward
    assert work.elements == model.parameters
    assert work.buckets[-1].ready == 1.0
    linear = next(bucket for bucket in work.buckets if bucket.elements > 100e6)
    # the layer that holds most is ready when the backward has hardly begun
    assert linear.ready < 0.01
    assert work_of_model(
        MODELS["gpt2-xl"], A100, batch=1, recompute=True
    ).backward == pytest.approx(1.5 * work_of_model(MODELS["gpt2-xl"], A100, batch=1).backward)


def test_sharded_parameters_travel_layer_by_layer() -> None:
    work = work_of_model(MODELS["llama-8b"], A100, batch=1, sharded=True)
    assert len(work.buckets) == 34
    assert 3 * work.width == 8  # bytes: twice 2, once 4
    assert work_of_model(MODELS["resnet50"], P100, batch=1, sharded=True).width == 4


def test_layouts_use_every_device_once() -> None:
    found = list(layouts(MODELS["gpt2-xl"], 64, 8))
    meshes = [method.mesh for method in found if method.mesh is not None]
    assert {mesh.size for mesh in meshes} == {64}
    assert all(mesh.tensor <= 8 for mesh in meshes)
    assert Mesh(shard=8, data=8) in meshes
    assert len({name_of(method) for method in found}) == len(found)
    assert [name_of(method) for method in layouts(MODELS["resnet50"], 12, 8)] == [
        "replicated",
        "update sharded",
        "mesh shard=12",
    ]
    assert [name_of(method) for method in layouts(MODELS["gpt2-xl"], 1, 8)] == ["replicated"]


def test_efficiency_falls_with_devices_and_one_is_whole() -> None:
    plan = plan_model(MODELS["vgg16"], P100, [512, 1, 8, 64], SLOW, method=Parallelism())
    assert [workers for workers, _ in plan.rows] == [1, 8, 64, 512]
    efficiencies = [found[0].efficiency for _, found in plan.rows]
    assert efficiencies[0] == 1.0
    assert efficiencies == sorted(efficiencies, reverse=True)
    assert plan.rows[-1][1][0].samples_per_s == pytest.approx(
        512 * 154 * efficiencies[-1], rel=0.01
    )


def test_layouts_are_ranked_and_the_sum_is_the_step() -> None:
    plan = plan_model(MODELS["gpt3-175b"], A100, [64], QUICK)
    ((_, found),) = plan.rows
    steps = [each.predicted.step for each in found]
    assert steps == sorted(steps)
    assert len(found) > 2
    for each in found:
        parts = sum(each.predicted.parts.values())
        assert parts == pytest.approx(each.predicted.step)
        assert each.memory.total < A100.memory
        assert each.predicted.low <= each.predicted.step <= each.predicted.high


def test_what_fits_nowhere_says_so() -> None:
    plan = plan_model(MODELS["gpt3-175b"], A100, [1, 8], QUICK)
    assert [row["step_ms"] for row in plan.as_json()] == [None, None]
    assert [row["layouts"] for row in plan.as_json()] == [[], []]
    text = plan.describe()
    assert "replicated" in text
    assert "no: weights, gradients, optimizer\n" in text
    assert "no: weights, gradients, on any number of devices\n" in text
    assert text.count("no layout fits") == 2


def test_json_rows_are_in_order_of_workers() -> None:
    rows = json.loads(json.dumps(plan_model(MODELS["resnet50"], P100, [4, 2, 4], SLOW).as_json()))
    assert [row["workers"] for row in rows] == [2, 4]
    assert {"workers", "step_ms", "efficiency", "limiting", "samples_per_s", "layout"} <= set(
        rows[0]
    )
    assert 0 < rows[1]["efficiency"] < 1
    assert rows[1]["layouts"][0]["step_ms"] == rows[1]["step_ms"]


def test_recomputing_is_the_last_resort_and_costs_a_forward() -> None:
    small, large = (
        plan_model(MODELS["gpt2-xl"], A100, [1], QUICK, batch=batch).rows[0][1][0]
        for batch in (1, 32)
    )
    assert not small.recompute
    assert large.recompute
    assert large.name == "replicated, recomputing activations"
    assert large.efficiency == pytest.approx(3 / 4)


@pytest.mark.parametrize(
    ("model", "mesh", "workers", "code", "values"),
    [
        ("vgg16", Mesh(pipeline=2), [4], "mesh-not-planned", {"what": "vgg16"}),
        ("gpt2-xl", Mesh(pipeline=64), [64], "mesh-too-many-stages", {"layers": 48}),
        ("gpt2-xl", Mesh(tensor=2), [4, 3], "mesh-workers", {"workers": [3], "others": 2}),
    ],
)
def test_meshes_that_do_not_go_with_the_model(
    model: str, mesh: Mesh, workers: list[int], code: str, values: dict[str, Any]
) -> None:
    with refused(code, mesh=str(mesh), **values):
        plan_model(MODELS[model], A100, workers, QUICK, method=Parallelism(mesh=mesh))


def test_a_given_mesh_takes_the_other_devices_as_replicas() -> None:
    plan = plan_model(
        MODELS["gpt2-xl"], A100, [2, 8], QUICK, method=Parallelism(mesh=Mesh(tensor=2))
    )
    assert [found[0].name for _, found in plan.rows] == ["mesh tensor=2", "mesh data=4,tensor=2"]


def test_a_replica_on_two_devices_computes_two_micro_batches() -> None:
    free = nvlink(2, gigabytes=1e9, gbit=1e9)
    plan = plan_model(MODELS["gpt2-xl"], A100, [2], free, method=Parallelism(mesh=Mesh(pipeline=2)))
    ((_, (found,)),) = plan.rows
    # 1 of 2 + 2 - 1 turns is idle
    assert found.predicted.bubble == pytest.approx(found.predicted.computation / 2)
    assert found.efficiency == pytest.approx(2 / 3, rel=0.02)
