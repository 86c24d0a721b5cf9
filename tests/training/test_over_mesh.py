"""A task trained over every mesh of four ranks: the losses, gradients and weights of one
process, and checkpoints that move between all of them.
"""

import json
import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from lockstep.checkpoints import files, folders
from lockstep.checkpoints.pieces import read_all
from lockstep.config.settings import Settings
from lockstep.tasks import text
from lockstep.testing import run_ranks
from lockstep.training.loop import Training
from lockstep.training.run_directory import RunDirectory
from lockstep.training.train import train
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
FAST = ("pipeline=4", "data=2,tensor=2", "data=2,shard=2")
"""Of each way to split a model, one."""
CASES = [pytest.param(mesh, marks=[] if mesh in FAST else pytest.mark.rest) for mesh in EVERY]
STEPS = 4  # a wrong state of the optimizer shows in the second loss
HALF = 2  # steps before, and after, a checkpoint moves


def small():
    size = {"width": 16, "depth": 2, "length": 8, "micro_batch": 4}
    return text.task(train_bytes=6000, eval_bytes=600, lr=1e-2, **size)


def run(world, mesh, directory, task, steps):
    """Losses of all steps, as rank 0's metrics.jsonl has them, and the result."""
    options = {"steps": steps, "mesh": mesh, "checkpoint_every": 1000}
    result = train(task, run=directory, world=world, **options)
    world.barrier()
    return [step["loss"] for step in toy.records(directory, "step")], result


def weights_of(directory):
    return files.read(folders.newest(directory / "checkpoints")).tensors


def check_weights(one, other, **tolerance):
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(
            other[name], tensor, msg=lambda text, name=name: f"{name}: {text}", **tolerance
        )


def over(world, mesh, directory):
    """A training, and one gradient, in one start of the ranks. After one step of plain SGD, the
    difference of weights is the gradient.
    """
    losses, result = run(world, mesh, Path(directory) / "run", small(), STEPS)
    plain = replace(small(), optimizer=plain_sgd, scheduler=None, clip=None)
    run(world, mesh, Path(directory) / "gradient", plain, 1)
    return losses, result.sha256, result.metrics


def plain_sgd(model):
    return torch.optim.SGD(model.parameters(), lr=1.0)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """What the ranks of a mesh return, None for one process, and their folder. Each mesh is
    trained once.
    """

    @cache
    def of(mesh):
        directory = tmp_path_factory.mktemp("trained")
        if mesh is None:
            return [toy.alone(over, mesh, str(directory))], directory
        return run_ranks(over, 4, (mesh, str(directory))), directory

    return of


@pytest.mark.parametrize("mesh", CASES)
def test_losses_gradients_weights_and_metrics_are_those_of_one_process(mesh, trained):
    ((losses, _, metrics),), alone = trained(None)
    ranks, directory = trained(mesh)
    assert ranks[0][0] == pytest.approx(losses, rel=1e-4)
    (digest,) = {digest for _, digest, _ in ranks}
    checkpoint = files.read(folders.newest(directory / "run" / "checkpoints"))
    assert checkpoint.state["sha256"] == digest
    check_weights(weights_of(alone / "run"), checkpoint.tensors, rtol=1e-3, atol=1e-4)
    assert json.loads((alone / "run" / "result.json").read_text())["metrics"] == metrics
    for _, _, of_rank in ranks:
        assert of_rank == pytest.approx(metrics, rel=1e-4)
    gradients = weights_of(directory / "gradient")
    check_weights(weights_of(alone / "gradient"), gradients, rtol=1e-5, atol=2e-7)
    if mesh in ("pipeline=4", "shard=4", "tensor=2,pipeline=2"):
        check_shares(mesh, json.loads((directory / "run" / "mesh.json").read_text()))


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


def training_of(world, mesh, directory):
    """One that is walked by hand, at a constant learning rate and without evaluation."""
    directory.mkdir(exist_ok=True)
    options = {"steps": 2 * HALF, "mesh": mesh, "checkpoint_every": 1000, "device": "cpu"}
    settings = Settings(task="text", workers=world.size, **options)
    left_out = ("scheduler", "eval_data", "metrics", "best", "best_mode", "eval_micro_batch")
    task = replace(small(), **dict.fromkeys(left_out))
    return Training(task, settings, world, RunDirectory.of_launcher(directory))


def walked(training, count):
    losses = []
    for epoch in training.loader.epochs(9):
        for window in epoch:
            losses.append(training.step(window).loss)
            if len(losses) == count:
                return losses
    raise AssertionError


def first_half(world, mesh, directory):
    training = training_of(world, mesh, directory)
    losses = walked(training, HALF)
    training.saves.stop(training.state)
    return losses


def second_half(world, mesh, directory):
    training = training_of(world, mesh, directory)
    changed, found = training.resume()
    assert (changed, found.step) == ("", HALF)
    return walked(training, HALF)


def moves(world, directory, before):
    """The losses of the first half, and of the second by the mesh after."""
    folder, found = Path(directory), {}
    first = [] if before is None else first_half(world, before, folder / "first")
    for after in after_of(before):
        place = folder / after
        if world.rank == 0:
            shutil.copytree(folder / "first", place)
        world.barrier()
        found[after] = second_half(world, after, place)
    return first, found


def after_of(before):
    """All after one process. After a mesh two others: what it saves is compared, and so goes on
    wherever one process's does.
    """
    if before is None:
        return EVERY
    place = EVERY.index(before)
    return [EVERY[(place + more) % len(EVERY)] for more in (1, 4)]


def straight(world, directory):
    """The losses of one process, which also leaves a checkpoint of the first half."""
    first_half(world, None, Path(directory) / "first")
    return walked(training_of(world, None, Path(directory) / "whole"), 2 * HALF)


@pytest.fixture(scope="module")
def straightly(tmp_path_factory):
    """One process's losses, and the folder with its checkpoint."""
    folder = tmp_path_factory.mktemp("straight")
    return toy.alone(straight, str(folder)), folder


@pytest.mark.parametrize(
    "before",
    [pytest.param(mesh, marks=[] if mesh == FAST[0] else pytest.mark.rest) for mesh in EVERY],
)
def test_a_checkpoint_moves_to_other_meshes_and_to_one_process(before, straightly, tmp_path):
    losses, alone = straightly
    for first, found in run_ranks(moves, 4, (str(tmp_path), before)):
        assert first == pytest.approx(losses[:HALF], rel=1e-4)
        for after, rest in found.items():
            assert rest == pytest.approx(losses[HALF:], rel=1e-4), f"{before} -> {after}"
    rest = toy.alone(second_half, None, tmp_path / "first")
    assert rest == pytest.approx(losses[HALF:], rel=1e-4)
    check_saved(alone / "first", tmp_path / "first")


def check_saved(one, other):
    """Two checkpoints hold the same: files, weights, and the optimizer's state."""
    ours, theirs = (folders.newest(each / "checkpoints") for each in (one, other))
    check_weights(files.read(ours).tensors, files.read(theirs).tensors, rtol=1e-3, atol=1e-4)
    states = (read_all(files.read(folder).optimizer()) for folder in (ours, theirs))
    check_weights(*states, rtol=1e-3, atol=1e-4)


@pytest.mark.rest  # eight trainings of four ranks
def test_a_checkpoint_of_one_process_goes_on_over_every_mesh(straightly):
    losses, folder = straightly
    for _, found in run_ranks(moves, 4, (str(folder), None)):
        assert list(found) == list(EVERY)
        for after, rest in found.items():
            assert rest == pytest.approx(losses[HALF:], rel=1e-4), after
