"""What cannot be laid over a mesh is refused in a sentence, before anything is trained. Which
settings a mesh goes with is tests/config's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lockstep.config.mesh import Mesh
from lockstep.config.parts import Parts
from lockstep.config.settings import Settings
from lockstep.errors import LockstepError, TaskError, UsageError, WorkerFailed
from lockstep.tasks import digits, text
from lockstep.testing import run_ranks
from lockstep.training.train import train
from lockstep.world.world import World
from tests.refused import refused


def test_a_mesh_of_data_alone_goes_with_everything() -> None:
    Settings(task="text", workers=2, mesh="data=2", exact=True)
    Settings(task="text", workers=2, mesh="data=2", sync_every=5)
    Settings(task="text", workers=4, mesh="data=2,pipeline=2", update="sharded")
    with refused("unknown-choice", name="schedule", value="2f2b"):
        Settings(task="text", workers=2, mesh="pipeline=2", schedule="2f2b")


class Pair(nn.Module):
    """Gives two tensors, as recurrent layers do."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x, x


class Taken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, both: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return self.layer(both[0])


def norms() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))


def pairs() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), Pair(), Taken(), nn.Linear(8, 4))


def three() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4))


@dataclass(frozen=True)
class Case:
    model: Callable[[], nn.Module]
    mesh: str
    kind: type[LockstepError]
    code: str
    values: dict[str, Any] = field(default_factory=dict)
    parts: Parts = field(default_factory=Parts)


CASES = [
    Case(
        three,
        "pipeline=4",
        UsageError,
        "too-few-layers",
        {"stages": 4, "count": 3, "layers": ["0", "1", "2"]},
    ),
    *[
        Case(
            norms,
            mesh,
            TaskError,
            "buffer-changes-in-forward",
            {"mesh": mesh, "buffer": "1.num_batches_tracked"},
        )
        for mesh in ("pipeline=2", "shard=2")
    ],
    Case(three, "tensor=2", TaskError, "tensor-plan-missing", {"count": 2}),
    Case(
        three, "pipeline=2", UsageError, "unknown-layer", {"layer": "7"}, parts=Parts(stages=["7"])
    ),
]


def trains(world: World, model: Callable[[], nn.Module], mesh: str, parts: Parts) -> None:
    data = [(torch.full((8,), float(number)) / 9, number % 4) for number in range(16)]
    task = replace(
        digits.task(),
        model=model,
        parts=parts,
        train_data=data,
        global_batch=8,
        micro_batch=2,
        name="made",
        **dict.fromkeys(("eval_data", "metrics", "best", "best_mode", "early_stopping")),
        **dict.fromkeys(("scheduler", "eval_micro_batch")),
    )
    train(task, steps=2, mesh=mesh, world=world)


def each_case(world: World) -> None:
    """All ranks refuse, and the world is as before."""
    for case in CASES:
        if Mesh.read(case.mesh).size == world.size:
            with refused(case.code, case.kind, **case.values):
                trains(world, case.model, case.mesh, case.parts)


@pytest.mark.parametrize("ranks", [2, 4])
def test_models_that_cannot_be_split_are_refused_on_all_ranks(ranks: int) -> None:
    run_ranks(each_case, ranks)


def test_a_stage_that_ends_in_a_tuple_is_named() -> None:
    parts = Parts(layers=list, stages=["2"])
    with pytest.raises(
        WorkerFailed, match=r"TaskError: .*layers 0 to 1 returned a tuple"
    ) as failed:
        run_ranks(trains, 2, (pairs, "pipeline=2", parts))
    assert failed.value.rank == 0
    assert "[layer-gives-no-tensor]" in str(failed.value)


def refuses_pickle(world: World, folder: Path) -> float:
    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("objects are pickled between ranks")

    for name in (
        "recv_object_list",
        "send_object_list",
        "broadcast_object_list",
        "all_gather_object",
        "gather_object",
        "scatter_object_list",
    ):
        setattr(dist, name, never)
        setattr(dist.distributed_c10d, name, never)
    sizes = {"train_bytes": 3000, "eval_bytes": 600, "width": 16, "depth": 2, "length": 8}
    return train(text.task(**sizes), steps=3, run=folder, mesh="pipeline=2", world=world).loss


def test_nothing_is_pickled_between_the_ranks_of_a_pipeline(tmp_path: Path) -> None:
    first, second = run_ranks(refuses_pickle, 2, (tmp_path / "run",))
    assert first == second
