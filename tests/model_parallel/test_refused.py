"""What cannot be laid over a mesh is refused in a sentence, before anything is trained. Which
settings a mesh goes with is tests/config's; models and plans are test_split.py's and
test_tensor.py's.
"""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from lockstep.config.parts import Parts
from lockstep.config.settings import Settings
from lockstep.errors import TaskError, WorkerFailed
from lockstep.testing import run_ranks
from lockstep.training.train import train
from lockstep.world.world import World
from tests.model_parallel.layered import Turned
from tests.model_parallel.test_cases import WORDS, task, wide
from tests.refused import refused


def test_a_mesh_of_data_alone_goes_with_everything() -> None:
    Settings(task="text", workers=2, mesh="data=2", exact=True)
    Settings(task="text", workers=2, mesh="data=2", sync_every=5)
    Settings(task="text", workers=4, mesh="data=2,pipeline=2", update="sharded")
    with refused("unknown-choice", name="schedule", value="2f2b"):
        Settings(task="text", workers=2, mesh="pipeline=2", schedule="2f2b")


def norms() -> nn.Module:
    return nn.Sequential(nn.Embedding(WORDS, 8), nn.BatchNorm1d(4), nn.Linear(8, WORDS), Turned())


def trains(world: World, model: Any, mesh: str, **changes: Any) -> None:
    train(task(model, **changes), mesh=mesh, world=world)


@pytest.mark.parametrize("mesh", ["pipeline=2", "shard=2"])
def test_a_buffer_that_changes_in_a_forward_is_refused(mesh: str) -> None:
    """In the first forward, on the rank that has it."""
    with pytest.raises(WorkerFailed, match=r"\[buffer-changes-in-forward\]") as failed:
        run_ranks(trains, 2, (norms, mesh))
    assert "1.num_batches_tracked" in str(failed.value)
    assert f"mesh='{mesh}'" in str(failed.value)


def refuses(world: World) -> None:
    with refused("tensor-plan-missing", TaskError, count=2):
        trains(world, wide, "tensor=2")
    with refused("unknown-layer", layer="7"):
        trains(world, wide, "pipeline=2", parts=Parts(stages=["7"]))


def test_models_that_cannot_be_split_are_refused_on_all_ranks() -> None:
    run_ranks(refuses, 2)
