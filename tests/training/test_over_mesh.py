"""A task trained over every mesh of four ranks: the losses, gradients and weights of one
process, and checkpoints that move between all of them.
"""

import json
import shutil
from dataclasses import replace

import pytest
import torch

from lockstep.checkpoints import files, folders
from lockstep.checkpoints.pieces import read_all
from lockstep.tasks import text
from lockstep.training.train import train
from tests.teams import on_team
from tests.training import toy

EVERY = (
    "data=4",
    "pipeline=4",
    "data=2,pipeline=2",
    "data=2,tensor=2",
    "tensor=2,pipeline=2",
    "shard=4",
    "data=2,shard=2",
    "shard=2,tensor=2",
)
FAST = ("tensor=2,pipeline=2", "data=2,shard=2")
"""All ways to split a model."""
CASES = [pytest.param(mesh, marks=[] if mesh in FAST else pytest.mark.rest) for mesh in EVERY]
STEPS = 4  # a wrong state of the optimizer shows in the second loss
HALF = 2  # steps before, and after, a checkpoint moves


def small():
    size = {"width": 16, "depth": 2, "length": 8, "micro_batch": 4}
    return text.task(train_bytes=6000, eval_bytes=600, lr=1e-2, **size)


def run(world, mesh, directory, task, steps=STEPS):
    """Losses of all steps, as rank 0's metrics.jsonl has them, and the result."""
    options = {"steps": steps, "mesh": mesh, "checkpoint_every": HALF}
    result = train(task, run=directory, world=world, **options)
    world.barrier()
    return [step["loss"] for step in toy.records(directory, "step")], result


def plain_sgd(model):
    return torch.optim.SGD(model.parameters(), lr=1.0)


def over(world, mesh, directory):
    """A training, and one gradient: after one step of plain SGD, the difference of weights is the
    gradient. And the second half of the training that `directory` holds the first half of.
    """
    losses, result = run(world, mesh, directory / "run", small())
    plain = replace(small(), optimizer=plain_sgd, scheduler=None, clip=None)
    run(world, mesh, directory / "gradient", plain, 1)
    resumed = directory / "interrupted"
    again = run(world, mesh, resumed, small())[0] if resumed.exists() else []
    return losses, again, result.sha256, result.metrics


def interrupt(finished, directory):
    """Make of a finished run one that ended after its first checkpoint."""
    shutil.copytree(finished, directory)
    (directory / "result.json").unlink()
    shutil.rmtree(folders.newest(directory / "checkpoints"))


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """What one process returns, and its folder."""
    directory = tmp_path_factory.mktemp("alone")
    return toy.alone(over, None, directory), directory


@pytest.mark.parametrize("mesh", CASES)
def test_a_mesh_trains_as_one_process_and_checkpoints_move_between_them(mesh, alone, tmp_path):
    (losses, _, _, metrics), directory = alone
    interrupt(directory / "run", tmp_path / "interrupted")
    ranks = on_team(over, 4, (mesh, tmp_path))
    (digest,) = {digest for *_, digest, _ in ranks}
    checkpoint = files.read(folders.newest(tmp_path / "run" / "checkpoints"))
    assert checkpoint.state["sha256"] == digest
    for trained, resumed, _, of_rank in ranks:
        assert trained == pytest.approx(losses, rel=1e-4)
        assert resumed == pytest.approx(losses, rel=1e-4)
        assert of_rank == pytest.approx(metrics, rel=1e-4)
    for step in (HALF, STEPS):
        check_saved(step, directory / "run", tmp_path / "run", rtol=1e-3, atol=1e-4)
    check_saved(1, directory / "gradient", tmp_path / "gradient", rtol=1e-5, atol=2e-7)
    interrupt(tmp_path / "run", tmp_path / "back")
    resumed, _ = toy.alone(run, None, tmp_path / "back", small())
    assert resumed == pytest.approx(losses, rel=1e-4)
    if mesh in ("pipeline=4", "shard=4", "tensor=2,pipeline=2"):
        check_shares(mesh, json.loads((tmp_path / "run" / "mesh.json").read_text()))


def check_saved(step, one, other, **tolerance):
    """Two checkpoints of a step hold the same: files, weights, and the optimizer's state."""
    directories = (run / "checkpoints" for run in (one, other))
    ours, theirs = (files.read(folders.folder_of(path, step)) for path in directories)
    check_tensors(ours.tensors, theirs.tensors, **tolerance)
    check_tensors(read_all(ours.optimizer()), read_all(theirs.optimizer()), **tolerance)


def check_tensors(ours, theirs, **tolerance):
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(
            theirs[name], tensor, msg=lambda text, name=name: f"{name}: {text}", **tolerance
        )


def check_shares(mesh, shares):
    """No rank has held the whole model."""
    assert shares["mesh"] == mesh.replace("tensor=2,pipeline=2", "pipeline=2,tensor=2")
    held = [rank["parameters"] for rank in shares["ranks"]]
    whole = shares["ranks"][0]["of"]
    assert max(held) < 0.75 * whole
    assert sum(held) >= whole
    if mesh == "pipeline=4":
        stages = [stage for rank in shares["ranks"] for stage in rank["stages"].values()]
        names = [name for stage in stages for name in stage]
        assert names == ["bytes", "blocks.0", "blocks.1", "norm", "head"]
