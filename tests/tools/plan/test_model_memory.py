"""RankMemory by hand: the ZeRO paper's example, and the least number of devices."""

from __future__ import annotations

import pytest

from lockstep.config.mesh import Mesh
from lockstep.config.parallelism import Parallelism
from lockstep.tools.plan.model_plan import (
    RESERVED,
    RankMemory,
    fits,
    least_devices,
    memory,
    too_large,
)
from lockstep.tools.plan.model_table import DEVICES, MODELS, Model, ModelLayer

A100 = DEVICES["a100-80g"]
# 7.5 billion parameters, as in figure 1 of the ZeRO paper (arXiv 1910.02054), in 100 layers that
# keep nothing.
EVEN = Model(
    name="even",
    family="transformer",
    layers=(ModelLayer(parameters=75_000_000, flops=1.0, kept=0.0),) * 100,
    batch=1,
    blocks=98,
    width=0,
)


def gigabytes(method: Parallelism, workers: int) -> float:
    return memory(EVEN, A100, method, workers, batch=1).total / 1e9


def test_sixteen_bytes_a_parameter() -> None:
    held = memory(EVEN, A100, Parallelism(), 64, batch=1)
    assert (held.weights, held.gradients, held.optimizer) == (30e9, 30e9, 60e9)
    assert held.total == 120e9


def test_the_layouts_of_64_devices() -> None:
    assert gigabytes(Parallelism(update="sharded"), 64) == pytest.approx(60 + 60 / 64)
    whole = 2 * 2 * 0.075 + 4 * 0.075  # two layers in 16 bits, the gradient of one
    assert gigabytes(Parallelism(mesh=Mesh(shard=64)), 64) == pytest.approx(120 / 64 + whole)
    assert gigabytes(Parallelism(mesh=Mesh(shard=8, data=8)), 64) == pytest.approx(120 / 8 + whole)
    assert gigabytes(Parallelism(mesh=Mesh(tensor=8, data=8)), 64) == pytest.approx(120 / 8)
    stages = 16 * 0.075 * (49 + 1)  # half of the blocks and an end
    assert gigabytes(Parallelism(mesh=Mesh(pipeline=2, data=32)), 64) == pytest.approx(stages)


def test_activations_grow_with_the_batch_and_shrink_where_they_are_recomputed() -> None:
    model = MODELS["gpt2-xl"]
    one, two = (memory(model, A100, Parallelism(), 1, batch=batch).activations for batch in (1, 2))
    assert two == 2 * one > 0
    again = memory(model, A100, Parallelism(), 1, batch=1, recompute=True).activations
    assert again < one / 5
    assert memory(model, A100, Parallelism(mesh=Mesh(tensor=2)), 2, batch=1).activations == one / 2
    assert memory(model, DEVICES["p100"], Parallelism(), 1, batch=1).activations == 2 * one  # fp32


def test_gpt3_fits_nowhere_whole() -> None:
    model = MODELS["gpt3-175b"]
    assert not fits(memory(model, A100, Parallelism(), 10_000, batch=1), A100)
    assert not fits(memory(model, A100, Parallelism(update="sharded"), 10_000, batch=1), A100)
    replicated, sharded, shard, split = least_devices(model, A100, batch=1, recompute=True)
    assert (replicated.devices, sharded.devices) == (None, None)
    assert too_large(replicated.memory, A100) == ("weights", "gradients", "optimizer")
    assert too_large(sharded.memory, A100) == ("weights", "gradients")
    lower_bound = 16 * model.parameters / (A100.memory - RESERVED)
    for found in (shard, split):
        assert found.devices is not None
        assert lower_bound < found.devices < 1.4 * lower_bound
        assert too_large(found.memory, A100) == ()
        assert found.method.mesh is not None
        assert found.method.mesh.size == found.devices


def test_what_fits_alone_may_not_fit_together() -> None:
    half = RankMemory(
        weights=0.4 * A100.memory,
        gradients=0.4 * A100.memory,
        optimizer=0.4 * A100.memory,
        activations=0,
    )
    assert too_large(half, A100) == ("all together",)


@pytest.mark.parametrize("name", ["llama-8b", "gpt3-175b"])
def test_the_least_number_fits_and_one_less_does_not(name: str) -> None:
    model = MODELS[name]
    count = next(
        each.devices
        for each in least_devices(model, A100, batch=1, recompute=True)
        if each.kind == "shard"
    )
    assert count is not None
    assert count > 1
    assert fits(
        memory(model, A100, Parallelism(mesh=Mesh(shard=count)), count, batch=1, recompute=True),
        A100,
    )
    assert not fits(
        memory(
            model, A100, Parallelism(mesh=Mesh(shard=count - 1)), count - 1, batch=1, recompute=True
        ),
        A100,
    )


def test_a_small_model_needs_one_device() -> None:
    assert {
        each.devices for each in least_devices(MODELS["resnet50"], A100, batch=64, recompute=False)
    } == {1}
