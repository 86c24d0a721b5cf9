"""A task trained over every mesh of four ranks: the losses, gradients and weights of one process, and checkpoints that move between all of them."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lockstep.checkpoints import files, folders
from lockstep.settings import Settings
from lockstep.tasks import text
from lockstep.testing import run_ranks
from lockstep.training.run_directory import RunDirectory
from lockstep.training.train import Training, train

MESHES = (
    "data=4",
    "pipeline=4",
    "data=2,pipeline=2",
    "data=2,tensor=2",
    "tensor=2,pipeline=2",
    "shard=4",
    "data=2,shard=2",
)
MORE = ("shard=2,tensor=2",)
STEPS = 20
HALF = 2  # steps before, and after, a checkpoint moves: a wrong optimizer state shows in the second loss after it


def small(**more):
    settings = {"train_bytes": 6000, "eval_bytes": 600, "width": 16, "depth": 4, "length": 8, "lr": 1e-2, "micro_batch": 4} | more
    return text.task(**settings)


def run(world, mesh, directory, *, steps=STEPS, task=None, **more):
    """Losses of all steps, as rank 0's metrics.jsonl has them, and the result."""
    result = train(task or small(), steps=steps, run=directory, mesh=mesh, world=world, checkpoint_every=1000, **more)
    world.barrier()
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if line["kind"] == "step"], result


def weights_of(directory):
    return files.read(folders.newest(directory / "checkpoints")).tensors


def check_weights(one, other, **tolerance):
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(other[name], tensor, msg=lambda text, name=name: f"{name}: {text}", **tolerance)


def alone(world, directory):
    return run(world, None, Path(directory) / "one", steps=STEPS)[0]


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """One process: 20 steps."""
    directory = tmp_path_factory.mktemp("reference")
    (losses,) = run_ranks(alone, 1, (str(directory),))
    return losses, directory / "one"


def over(world, mesh, directory):
    losses, result = run(world, mesh, Path(directory))
    return losses, result.sha256, result.metrics


@pytest.mark.parametrize("mesh", [*MESHES, *MORE])
def test_losses_weights_and_metrics_are_those_of_one_process(mesh, reference, tmp_path):
    losses, directory = reference
    found = run_ranks(over, 4, (mesh, str(tmp_path / "run")))
    assert found[0][0] == pytest.approx(losses, rel=1e-4)
    assert len({sha256 for _, sha256, _ in found}) == 1
    assert files.read(folders.newest(tmp_path / "run" / "checkpoints")).state["sha256"] == found[0][1]
    check_weights(weights_of(directory), weights_of(tmp_path / "run"), rtol=1e-3, atol=1e-4)
    mine = json.loads((directory / "result.json").read_text())["metrics"]
    for _, _, metrics in found:
        assert metrics == pytest.approx(mine, rel=1e-4)


def test_no_rank_of_a_split_mesh_held_the_whole_model(tmp_path):
    for mesh in ("pipeline=4", "shard=4", "tensor=2,pipeline=2"):
        run_ranks(over, 4, (mesh, str(tmp_path / mesh)))
        said = json.loads((tmp_path / mesh / "mesh.json").read_text())
        assert said["mesh"] == mesh if "," not in mesh else "pipeline=2,tensor=2"
        held = [each["parameters"] for each in said["ranks"]]
        whole = said["ranks"][0]["of"]
        assert max(held) < 0.75 * whole
        assert sum(held) >= whole
        if mesh == "pipeline=4":
            names = [name for rank in said["ranks"] for stage in rank["stages"].values() for name in stage]
            assert names == ["bytes", "blocks.0", "blocks.1", "blocks.2", "blocks.3", "norm", "head"]


def plain_sgd(model):
    return torch.optim.SGD(model.parameters(), lr=1.0)


def one_gradient(world, mesh, directory):
    task = replace(small(), optimizer=plain_sgd, scheduler=None, clip=None)
    before = {name: value.clone() for name, value in task.model().state_dict().items()} if mesh is None else None
    run(world, mesh, Path(directory), steps=1, task=task)
    return before


@pytest.mark.parametrize("mesh", [*MESHES, *MORE])
def test_gradients_are_those_of_one_process(mesh, tmp_path):
    """After one step of plain SGD with a learning rate of 1 the difference of weights is the gradient."""
    run_ranks(one_gradient, 1, (None, str(tmp_path / "one")))
    run_ranks(one_gradient, 4, (mesh, str(tmp_path / "mesh")))
    check_weights(weights_of(tmp_path / "one"), weights_of(tmp_path / "mesh"), rtol=1e-5, atol=2e-7)


def trainings(world, mesh, directory, **more):
    """One that is walked by hand."""
    directory.mkdir(exist_ok=True)
    given = {"task": "text", "workers": world.size, "steps": 2 * HALF, "mesh": mesh, "checkpoint_every": 1000, "device": "cpu"} | more
    return Training(constant(), Settings(**given), world, RunDirectory.of_launcher(directory))


def constant():
    return replace(small(), scheduler=None, eval_data=None, metrics=None, best=None, best_mode=None, eval_micro_batch=None)


def walked(training, count):
    losses = []
    for epoch in training.loader.epochs(9):
        for window in epoch:
            losses.append(training.step(window).loss)
            if len(losses) == count:
                return losses
    raise AssertionError


def first_half(world, mesh, directory):
    training = trainings(world, mesh, directory)
    losses = walked(training, HALF)
    training.checkpoints.save(training._state())
    training.checkpoints.close()
    return losses


def second_half(world, mesh, directory):
    training = trainings(world, mesh, directory)
    assert training._resume().step == HALF
    return walked(training, HALF)


def moves(world, directory, before):
    folder, found = Path(directory), {}
    first = first_half(world, before, folder / "first")
    for after in [*MESHES, *MORE]:
        place = folder / after
        if world.rank == 0:
            shutil.copytree(folder / "first", place)
        world.barrier()
        found[after] = first + second_half(world, after, place)
    return found


def straight(world, directory):
    return walked(trainings(world, None, Path(directory)), 2 * HALF)


def goes_on(world, directory):
    return second_half(world, None, Path(directory))


@pytest.mark.parametrize("before", [*MESHES, *MORE])
def test_a_checkpoint_moves_to_every_other_mesh_and_to_one_process(before, tmp_path):
    (losses,) = run_ranks(straight, 1, (str(tmp_path / "one"),))
    for found in run_ranks(moves, 4, (str(tmp_path), before)):
        for after, its in found.items():
            assert its == pytest.approx(losses, rel=1e-4), f"{before} -> {after}"
    (rest,) = run_ranks(goes_on, 1, (str(tmp_path / "first"),))
    assert rest == pytest.approx(losses[HALF:], rel=1e-4)


def from_one(world, directory):
    return first_half(world, None, Path(directory))


def to_many(world, directory):
    return {mesh: second_half(world, mesh, Path(directory)) for mesh in [*MESHES, *MORE]}


def test_a_checkpoint_of_one_process_goes_on_over_every_mesh(tmp_path):
    (losses,) = run_ranks(straight, 1, (str(tmp_path / "one"),))
    run_ranks(from_one, 1, (str(tmp_path / "first"),))
    for found in run_ranks(to_many, 4, (str(tmp_path / "first"),)):
        for mesh, rest in found.items():
            assert rest == pytest.approx(losses[HALF:], rel=1e-4), mesh
