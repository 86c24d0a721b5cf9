"""What cannot be laid over a mesh is refused in a sentence, before anything is trained; what
costs time is warned of.
"""

from __future__ import annotations

import re
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lockstep.config.mesh import Mesh
from lockstep.config.parts import Parts
from lockstep.config.settings import Settings
from lockstep.errors import LockstepWarning, TaskError, UsageError, WorkerFailed
from lockstep.tasks import digits, text
from lockstep.testing import run_ranks
from lockstep.training.train import train


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"mesh": "data=2,pipeline=2", "workers": 3},
            "mesh='data=2,pipeline=2' has 4 ranks (data 2 x pipeline 2), but the run has 3",
        ),
        (
            {"mesh": "pipeline=2", "schedule": "2f2b"},
            ("schedule='2f2b' is unknown. Choose one of naive, gpipe, 1f1b"),
        ),
        (
            {"mesh": "data=2", "schedule": "gpipe"},
            "schedule='gpipe' configures a pipeline, but the mesh has no pipeline axis",
        ),
        (
            {"mesh": "pipeline=2", "precision": "fp16"},
            "precision='fp16' with mesh='pipeline=2': ranks would find different loss scales",
        ),
        (
            {"mesh": "shard=2", "compile": True},
            "compile=True with mesh='shard=2': a model that is split over ranks is not compiled",
        ),
        (
            {"mesh": "pipeline=2", "exact": True},
            "exact=True with mesh='pipeline=2': torch's parallelism adds in its own order",
        ),
        ({"mesh": "tensor=2", "compress": "bf16"}, "compress='bf16' with mesh='tensor=2'"),
        (
            {"mesh": "shard=2", "sync_every": 5},
            "sync_every=5 with mesh='shard=2': local steps need a whole model on each rank",
        ),
        (
            {"mesh": "pipeline=2", "update": "server"},
            "update='server' with mesh='pipeline=2': each worker of a server needs a whole model",
        ),
        (
            {"mesh": "tensor=2", "update": "sharded"},
            "update='sharded' with mesh='tensor=2': these parameters are already split",
        ),
        (
            {"mesh": "shard=2,pipeline=2", "workers": 4},
            "mesh='shard=2,pipeline=2': stages that run different micro-batches would gather",
        ),
        (
            {"mesh": "data=2", "grow": True},
            "mesh='data=2' fixes the number of ranks. Give exactly 2 workers, and no range",
        ),
    ],
)
def test_settings(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        Settings(**({"task": "text", "workers": 2} | given))


def test_a_mesh_of_data_alone_goes_with_everything() -> None:
    Settings(task="text", workers=2, mesh="data=2", exact=True)
    Settings(task="text", workers=2, mesh="data=2", sync_every=5)
    Settings(task="text", workers=4, mesh="data=2,pipeline=2", update="sharded")


class Pair(nn.Module):
    """Gives two tensors, as recurrent layers do."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x, x


class Counts(nn.Module):
    """A forward that writes to a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        found: torch.Tensor = self.layer(x)
        return found


def counting() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), Counts(), nn.Linear(8, 4))


def tied_ends() -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 8))
    model[3].weight = model[0].weight
    return model


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


def task(model: Any, **changes: Any) -> Any:
    data = [(torch.full((8,), float(number)) / 9, number % 4) for number in range(16)]
    made = digits.task()
    fields = {
        "train_data": data,
        "eval_data": None,
        "metrics": None,
        "best": None,
        "best_mode": None,
        "early_stopping": None,
        "scheduler": None,
        "eval_micro_batch": None,
    }
    return replace(
        made, model=model, global_batch=8, micro_batch=2, name="made", **fields, **changes
    )


def one(
    world: Any, model: Any, mesh: str, options: dict[str, Any], changes: dict[str, Any]
) -> None:
    train(task(model, **changes), steps=2, mesh=mesh, world=world, **options)


@pytest.mark.parametrize(
    ("model", "mesh", "options", "changes", "error", "code", "said"),
    [
        (
            three,
            "pipeline=4",
            {},
            {},
            UsageError,
            "too-few-layers",
            ("stages=4", "3 layers", "0, 1, 2"),
        ),
        (
            norms,
            "pipeline=2",
            {},
            {},
            TaskError,
            "buffer-changes-in-forward",
            ("mesh='pipeline=2'", "1.num_batches_tracked"),
        ),
        (
            norms,
            "shard=2",
            {},
            {},
            TaskError,
            "buffer-changes-in-forward",
            ("mesh='shard=2'", "1.num_batches_tracked"),
        ),
        (
            three,
            "tensor=2",
            {},
            {},
            TaskError,
            "tensor-plan-missing",
            ("tensor=2",),
        ),
        (
            pairs,
            "pipeline=2",
            {},
            {"parts": Parts(layers=list, stages=["2"])},
            TaskError,
            "layer-gives-no-tensor",
            ("layers 0 to 1 returned a tuple",),
        ),
        (
            three,
            "pipeline=2",
            {},
            {"parts": Parts(stages=["7"])},
            UsageError,
            "unknown-layer",
            ("stages", "'7'"),
        ),
    ],
)
def test_models(
    model: Any,
    mesh: str,
    options: Any,
    changes: Any,
    error: type[Exception],
    code: str,
    said: tuple[str, ...],
) -> None:
    ranks = Mesh.read(mesh).size
    with pytest.raises(WorkerFailed, match=re.escape(f"[{code}]")) as caught:
        run_ranks(one, ranks, (model, mesh, options, changes))
    assert all(each in str(caught.value) for each in (error.__name__, *said))


def few(world: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        train(replace(task(three), global_batch=4), steps=2, mesh="pipeline=3", world=world)
    return [str(each.message) for each in said if each.category is LockstepWarning]


def test_fewer_micro_batches_than_stages_is_a_warning_with_what_it_costs() -> None:
    first, *others = run_ranks(few, 3)
    assert len(first) == 1
    assert re.search(r"there are 2 for 3\..*the ranks idle for 50%", first[0])
    assert others == [[], []]


def refuses_pickle(world: Any, folder: str) -> float:
    import torch.distributed as dist

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
        if hasattr(dist.distributed_c10d, name):
            setattr(dist.distributed_c10d, name, never)
    given = {"train_bytes": 3000, "eval_bytes": 600, "width": 16, "depth": 2, "length": 8}
    return train(text.task(**given), steps=3, run=Path(folder), mesh="pipeline=2", world=world).loss


def test_nothing_is_pickled_between_the_ranks_of_a_pipeline(tmp_path: Path) -> None:
    losses = run_ranks(refuses_pickle, 2, (str(tmp_path / "run"),))
    assert losses[0] == losses[1]
