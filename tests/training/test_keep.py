"""The newest checkpoint stays, and the best beside it; nobody but the writer writes."""

from __future__ import annotations

from pathlib import Path

import torch

from lockstep.checkpoints import files, folders
from lockstep.checkpoints.identity import sha256, weights
from lockstep.training.keep import Keeper
from lockstep.training.run_directory import RunDirectory
from lockstep.training.watch import Watch
from tests.training import toy


def test_newest_and_best(tmp_path: Path) -> None:
    model = toy.Net()
    keeper = Keeper(model, RunDirectory.of_launcher(tmp_path), writes=True)
    watch = Watch("accuracy", "max")
    hashes = {}
    for step, accuracy in ((4, 0.5), (8, 0.9), (12, 0.7)):
        torch.nn.init.constant_(model.last.bias, float(step))
        hashes[step] = sha256(weights(model))
        if watch.better({"accuracy": accuracy}, step):
            keeper.best(watch, step, {"task": "toy"})
    newest = keeper.newest(12, {"task": "toy"})
    directory = tmp_path / "checkpoints"
    assert newest == folders.newest(directory) == directory / "step-0000012"
    assert files.best(directory) == directory / "step-0000008"
    assert len(folders.written(directory)) == 2
    for step in (8, 12):
        found = files.read(directory / f"step-{step:07d}")
        assert found.state == {"step": step, "task": "toy", "sha256": hashes[step]}
        assert sha256(found.tensors) == hashes[step]


def test_the_other_ranks_know_where_and_write_nothing(tmp_path: Path) -> None:
    keeper = Keeper(toy.Net(), RunDirectory.of_launcher(tmp_path), writes=False)
    assert keeper.newest(3, {}) == tmp_path / "checkpoints" / "step-0000003"
    assert Keeper(toy.Net(), None, writes=True).newest(3, {}) is None
    assert list(tmp_path.iterdir()) == []
