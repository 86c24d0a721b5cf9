"""`lockstep evaluate` and `lockstep predict`: a run that was trained gives its own numbers again, on
any number of ranks; one file of predictions, in the order of the data set.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

import lockstep as package
from lockstep.checkpoints import files, folders
from lockstep.config.settings import Settings
from lockstep.training.inference.apply import fill
from lockstep.training.resolve import resolve
from tests.cli.command import Command
from tests.training import toy

TASK = """
from torch import nn
from tests.training import toy

class Other(toy.Net):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 16)
        self.last = nn.Linear(16, 4)

def task(other: bool = False):
    return toy.task(name=None, model=Other if other else toy.Net)
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory, made without a launcher, beside its task."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "run_task.py").write_text(TASK)
    task = str(folder / "run_task.py")
    with package.init(backend="gloo"):
        package.train(resolve(task), epochs=1, run=folder / "run", device="cpu")
    # what `lockstep train` leaves
    Settings(task=task, epochs=1, device="cpu").write(folder / "run")
    return folder / "run"


def test_the_runs_own_numbers_again_on_three_ranks(
    trained: Path, tmp_path: Path, lockstep: Command
) -> None:
    expected = json.loads((trained / "result.json").read_text())["metrics"]
    task = trained.with_name("run_task.py")
    ended = lockstep(f"evaluate {task} --run {trained} -n 3 --device cpu --json metrics.json")
    assert ended.code == 0, ended.err
    first, second, last = ended.out.splitlines()
    assert first.split() == ["accuracy", repr(expected["accuracy"])]
    assert second.split()[0] == "loss"
    start = "run_task: 21 samples, 3 workers, newest checkpoint (step 4)"
    assert last == f"{start} | accuracy {expected['accuracy']:.4f} | loss {expected['loss']:.4f}"
    report = json.loads((tmp_path / "metrics.json").read_text())
    assert report["metrics"]["accuracy"] == expected["accuracy"]
    assert report["metrics"]["loss"] == pytest.approx(expected["loss"], rel=1e-6)
    assert report["checkpoint"].endswith("step-0000004")
    # what only the ranks see is said once: weights of another model
    line = f"evaluate {trained.with_name('run_task.py')} --run {trained} --device cpu -n 2"
    other = lockstep(f"{line} --set other=true")
    assert (other.code, other.out) == (2, "")
    (sentence,) = other.err.splitlines()
    assert re.match(
        r"error: checkpoint .*step-0000004 \(of task 'run_task'\) .* task 'run_task': ", sentence
    )
    assert "missing: first.bias; of another shape: last.bias, last.weight" in sentence
    assert sentence.endswith(" [checkpoint-of-another-model]")


def test_the_same_predictions_from_one_rank_and_from_three(
    trained: Path, tmp_path: Path, lockstep: Command
) -> None:
    task = trained.with_name("run_task.py")
    options = f"predict {task} --run {trained} --device cpu"
    assert lockstep(f"{options} --workers 1").code == 0
    ended = lockstep(f"{options} --workers 3 --out three.npy")
    start = "run_task: 21 samples, 3 workers, newest checkpoint (step 4)"
    assert ended.out == f"{start} | predictions in three.npy\n"
    assert (tmp_path / "three.npy").read_bytes() == (trained / "predictions.npy").read_bytes()
    rows = np.load(tmp_path / "three.npy")
    assert rows.shape == (toy.HELD_OUT, 3)
    x, _ = toy.data(toy.HELD_OUT, 2)[:]
    model = resolve(str(task)).model()
    newest = folders.newest(trained / "checkpoints")
    assert newest is not None
    fill(model, files.read(newest).tensors, "", "")
    assert np.allclose(rows, model.eval()(x).detach().numpy(), atol=1e-6)


SMALL = "--set train_bytes=3000 --set eval_bytes=600 --set width=16 --set depth=2 --set length=8"


def test_a_pipeline_from_the_command_to_its_evaluation(tmp_path: Path, lockstep: Command) -> None:
    options = "--mesh pipeline=2 --schedule gpipe --steps 3 --device cpu"
    trained = lockstep(f"train text --run run {options} {SMALL}")
    assert trained.code == 0, trained.err
    last = trained.out.splitlines()[-1]
    assert re.match(
        r"text: 3 steps, 2 workers, mesh pipeline=2 gpipe, replicated, .* \| weights sha256"
        r" [0-9a-f]{64}$",
        last,
    )
    assert "mesh pipeline=2: a rank holds" in trained.err
    ranks = json.loads((tmp_path / "run" / "mesh.json").read_text())["ranks"]
    assert [rank["pipeline"] for rank in ranks] == [0, 1]
    stages = [*ranks[0]["stages"].values(), *ranks[1]["stages"].values()]
    names = [name for stage in stages for name in stage]
    assert names == ["bytes", "blocks.0", "blocks.1", "norm", "head"]
    evaluated = lockstep(f"evaluate text --run run --device cpu {SMALL}")
    assert evaluated.code == 0, evaluated.err
    metric = re.search(r"bits_per_byte ([\d.]+)", last)
    assert metric is not None
    assert metric[1] in evaluated.out
