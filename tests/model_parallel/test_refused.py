"""What cannot be laid over a mesh is refused before anything is trained."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from lockstep.config.mesh import Mesh
from lockstep.config.parts import Parts
from lockstep.config.settings import Settings
from lockstep.errors import TaskError, WorkerFailed
from lockstep.model_parallel.split_form import open_devices
from lockstep.testing import run_ranks
from lockstep.training.train import train
from lockstep.world.world import World
from tests.model_parallel.layered import Turned
from tests.model_parallel.test_cases import WORDS, task, wide
from tests.refused import refused
from tests.teams import on_team


def test_a_mesh_of_data_alone_goes_with_everything() -> None:
    for options in ({"exact": True}, {"sync_every": 5}):
        Settings(task="text", workers=2, mesh="data=2", **options)


def norms() -> nn.Module:
    return nn.Sequential(nn.Embedding(WORDS, 8), nn.BatchNorm1d(4), nn.Linear(8, WORDS), Turned())


def trains(world: World, model: Any, mesh: str, **changes: Any) -> None:
    train(task(model, **changes), mesh=mesh, world=world)


def test_a_buffer_that_changes_in_a_forward_is_refused() -> None:
    """In the first forward, on the rank that has it."""
    with pytest.raises(WorkerFailed, match=r"\[buffer-changes-in-forward\]") as failed:
        run_ranks(trains, 2, (norms, "pipeline=2"))
    assert "1.num_batches_tracked" in str(failed.value)


def refuses(world: World) -> None:
    with refused("mesh-of-other-size", size=4, workers=2):
        open_devices(Mesh(data=2, tensor=2), world)
    with refused("buffer-changes-in-forward"):
        trains(world, norms, "shard=2")
    with refused("tensor-plan-missing", TaskError, count=2):
        trains(world, wide, "tensor=2")
    with refused("unknown-layer", layer="7"):
        trains(world, wide, "pipeline=2", parts=Parts(stages=["7"]))


def test_models_that_cannot_be_split_are_refused_on_all_ranks() -> None:
    on_team(refuses, 2)
