"""`lockstep evaluate` from the outside: a run that was trained gives its own numbers again, on
any number of ranks.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import lockstep
from lockstep.config.settings import Settings
from lockstep.training.resolve import resolve
from tests.checkpoints.model_alone import write_model
from tests.cli.command import command as given
from tests.refused import refused

TASK = """
from torch import nn
from tests.training import toy

class Other(toy.Net):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 16)
        self.last = nn.Linear(16, 4)

def task(other: bool = False, held_out: bool = True):
    evaluation = {} if held_out else {"eval_data": None, "metrics": None}
    return toy.task(name=None, model=Other if other else toy.Net, **evaluation)
"""


def command(name: str, *args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "lockstep", name, *args]
    return subprocess.run(line, cwd=cwd, capture_output=True, text=True, check=False)


def trained(folder: Path) -> Path:
    """A run directory, made without a launcher."""
    file = folder / "run_task.py"
    file.write_text(TASK)
    run = folder / "run"
    with lockstep.init(backend="gloo"):
        lockstep.train(resolve(str(file)), epochs=1, run=run, device="cpu")
    Settings(task=str(file), epochs=1, device="cpu").write(run)  # what `lockstep train` leaves
    return run


def test_the_runs_own_numbers_again_on_three_ranks(tmp_path: Path) -> None:
    run = trained(tmp_path)
    expected = json.loads((run / "result.json").read_text())["metrics"]
    done = command(
        "evaluate",
        "run_task.py",
        "--run",
        "run",
        "--workers",
        "3",
        "--device",
        "cpu",
        "--json",
        "found.json",
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    first, second, last = done.stdout.splitlines()
    assert first.split() == ["accuracy", repr(expected["accuracy"])]
    assert second.split()[0] == "loss"
    start = "run_task: 21 samples, 3 workers, newest checkpoint (step 4)"
    assert last == f"{start} | accuracy {expected['accuracy']:.4f} | loss {expected['loss']:.4f}"
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["metrics"]["accuracy"] == expected["accuracy"]
    assert found["metrics"]["loss"] == pytest.approx(expected["loss"], rel=1e-6)
    assert found["checkpoint"].endswith("step-0000004")


def test_weights_of_another_model_are_named_once(tmp_path: Path) -> None:
    trained(tmp_path)
    done = command(
        "evaluate",
        "run_task.py",
        "--run",
        "run",
        "--set",
        "other=true",
        "--device",
        "cpu",
        "-n",
        "2",
        cwd=tmp_path,
    )
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert re.match(
        r"error: checkpoint .*step-0000004 \(of task 'run_task'\) .* task 'run_task': ",
        line,
    )
    assert "missing: first.bias; of another shape: last.bias, last.weight" in line
    assert line.endswith(" [checkpoint-of-another-model]")


def test_a_task_without_eval_data(tmp_path: Path) -> None:
    trained(tmp_path)
    done = command(
        "evaluate",
        "run_task.py",
        "--run",
        "run",
        "--set",
        "held_out=false",
        "--device",
        "cpu",
        cwd=tmp_path,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(r"error: task 'run_task' .* evaluate .*\[no-eval-data\]\n", done.stderr)


def test_mistakes_on_the_command_line_start_nothing(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with refused("not-a-run-directory", directory=str(run)):
        given("evaluate", "digits", run=run)
    run.mkdir()
    with refused("not-a-run-directory", directory=str(run)):
        given("evaluate", "digits", run=run)
    Settings(task="digits").write(run)
    with refused("no-checkpoint", run=run):
        given("evaluate", "digits", run=run)
    write_model(run / "checkpoints", 1, {}, {})
    with refused("no-best-checkpoint", run=run):
        given("evaluate", "digits", run=run, best=True)
    with refused("wrong-value", name="workers", value=0):
        given("evaluate", "digits", run=run, workers=0)
    with refused("unknown-choice", name="device", value="tpu"):
        given("evaluate", "digits", run=run, device="tpu")
