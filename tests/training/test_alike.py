"""All ranks train the same task: another loss, other samples on one rank are named at the start;
what differs on purpose is not refused.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils.data import default_collate

import lockstep
from lockstep.errors import LockstepWarning, ReplicaDivergence
from lockstep.testing import run_ranks
from lockstep.training.alike import compare_tasks
from lockstep.training.task_digest import task_digests
from lockstep.training.train import train
from tests.refused import refused
from tests.training import toy


def doubled(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    loss, weight = toy.loss(output, batch)
    return 2 * loss, weight


def by_rank(rank: int) -> Any:
    def loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
        print(rank, end="")
        return toy.loss(output, batch)

    return loss


def found(world: lockstep.World, folder: str) -> dict[str, Any]:
    odd = world.rank == 1
    told: dict[str, Any] = {}
    for name, task in {
        "loss": toy.task(loss=doubled if odd else toy.loss),
        "samples": toy.task(train_data=toy.data(toy.SAMPLES, 1 + odd)),
        "collate": toy.task(
            collate=(lambda samples: default_collate(samples[::-1])) if odd else None
        ),
    }.items():
        code = "samples-differ-between-ranks" if name == "samples" else "task-differs-between-ranks"
        with refused(code, ReplicaDivergence, others="rank 1") as caught:
            train(task, run=f"{folder}/{name}", epochs=1, world=world)
        told[name] = caught.value.values["ranks"], caught.value.values["parameter"]
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        compare_tasks(world.control, task_digests(toy.task(loss=by_rank(world.rank))))
    told["value"] = [str(each.message) for each in warned if each.category is LockstepWarning]
    # what one rank has not read
    compare_tasks(world.control, {} if odd else task_digests(toy.task()))
    return told


def test_a_rank_with_another_task_is_named_at_the_start(tmp_path: Path) -> None:
    first, second, third = run_ranks(found, 3, args=(str(tmp_path),))
    for each in (first, second, third):
        assert [each[name][0] for name in ("loss", "samples", "collate")] == [[1]] * 3
    assert first["loss"][1] == "loss"
    assert first["samples"][1].startswith("sample ")
    assert first["collate"][1] == "collate"
    assert len(first["value"]) == 1
    assert "rank is 0 on rank 0 and 1 on rank 1" in first["value"][0]
    assert second["value"] == third["value"] == []
