"""`lockstep tune` from the outside, and `lockstep train --settings` with what it wrote. No time
is asserted.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.cli.train import AppliedTuning
from lockstep.config.settings import Settings
from lockstep.errors import UsageError
from lockstep.launcher import supervise
from lockstep.training.tuned import Tuned
from tests.cli.command import command as given
from tests.refused import refused
from tests.training.test_tuned import MEASURED

TASK = """
from tests.training import toy

def loss(output, batch):
    if PLACE:
        raise ArithmeticError("in my loss")
    return toy.loss(output, batch)

PLACE = ""

def task(place: str = "", micro_batch: int = 4):
    global PLACE
    PLACE = place
    if place == "typo":
        return toy.tusk()
    return toy.task(name=None, loss=loss, global_batch=12, micro_batch=micro_batch)
"""


def lockstep(*args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "lockstep", *args]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "my_task.py").write_text(TASK)
    return tmp_path


def test_two_workers_get_a_table_a_file_and_a_command(folder: Path) -> None:
    done = lockstep(
        "tune",
        "my_task.py",
        "--workers",
        "2",
        "--device",
        "cpu",
        "--seconds",
        "3",
        "--out",
        "tuned.json",
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert re.match(r"my_task: 2 workers on the CPU \(.*\), torch", lines[0])
    assert lines[2].split()[:4] == ["knob", "value", "ms", "a"]
    for knob, value in (
        ("reduce", "(native|shared_memory)"),  # the one that a trial did not choose
        ("update", "sharded"),
        ("loader_workers", "1"),
        ("loader_workers", "2"),
    ):
        assert re.search(
            rf"^{knob} +{value} +(\d+\.\d\d +.*|not tried: no time left)$", done.stdout, re.M
        ), knob
    assert re.search(
        r"^bucket_mb +not tried: all other sizes put the 0.0 MiB of gradients into the same buckets$",
        done.stdout,
        re.M,
    )
    assert re.search(r"^winner: ", done.stdout, re.M)
    assert re.search(r"^4 +[\d,]+ +\d+  the task's own$", done.stdout, re.M)
    assert "advice: " in done.stdout
    assert lines[-1] == "lockstep train my_task.py --workers 2 --device cpu --settings tuned.json"
    tuned = Tuned.read(folder / "tuned.json")
    assert (tuned.measured.task, tuned.measured.workers, tuned.measured.device) == (
        "my_task",
        2,
        "cpu",
    )
    assert tuned.measured.torch == torch.__version__
    assert "micro_batch" not in tuned.settings


def test_one_worker_has_nothing_to_sum_and_its_command_needs_no_file(folder: Path) -> None:
    done = lockstep(
        "tune",
        "my_task.py",
        "--workers",
        "1",
        "--seconds",
        "2",
        "--set",
        "micro_batch=6",
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr
    for knob, why in (
        ("reduce", "one rank has nothing to sum"),
        ("update", "one rank has no other rank to share with"),
    ):
        assert re.search(rf"^{knob} +not tried: {why}$", done.stdout, re.M)
    assert re.search(r"^bucket_mb +not tried: one rank sends nothing$", done.stdout, re.M)
    assert done.stdout.splitlines()[-1].startswith(
        "lockstep train my_task.py --workers 1 --set micro_batch=6"
    )


@pytest.mark.parametrize(
    ("place", "last"),
    [
        ("typo", "AttributeError: module 'tests.training.toy' has no attribute 'tusk'"),
        ("loss", "ArithmeticError: in my loss"),
    ],
)
def test_a_tasks_own_error_is_the_users_traceback(folder: Path, place: str, last: str) -> None:
    done = lockstep(
        "tune",
        "my_task.py",
        "--workers",
        "2",
        "--seconds",
        "3",
        "--set",
        f"place={place}",
        "--out",
        "tuned.json",
        cwd=folder,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert re.search(
        rf"rank [01] \(.*\) failed( at step .*)?: {re.escape(last)}", done.stderr.splitlines()[-1]
    )
    assert 'my_task.py", line' in done.stderr
    assert "lockstep/tools/tune" not in done.stderr
    assert not (folder / "tuned.json").exists()


@pytest.mark.parametrize(
    ("task", "options", "code", "values"),
    [
        ("digit", {}, "unknown-task", {"task": "digit"}),
        ("digits", {"workers": 0}, "not-a-whole-number", {"name": "workers", "value": 0}),
        ("digits", {"device": "tpu"}, "unknown-choice", {"name": "device", "value": "tpu"}),
        ("digits", {"set": ["lr"]}, "not-a-pair", {"where": "--set", "text": "lr"}),
    ],
)
def test_mistakes_on_the_command_line_start_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    task: str,
    options: dict[str, Any],
    code: str,
    values: dict[str, Any],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(supervise, "supervise", None)
    with refused(code, **values):
        given("tune", task, **{"device": "cpu", **options})
    with pytest.raises(UsageError, match=r"--out nowhere/tuned.json cannot be written"):
        given("tune", "digits", device="cpu", out=Path("nowhere/tuned.json"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf"])
def test_the_time_is_above_zero(seconds: str) -> None:
    with pytest.raises(UsageError) as caught:
        given("tune", "digits", device="cpu", seconds=seconds)
    assert caught.value.code == "number-out-of-range"
    assert str(caught.value.values["value"]) == str(float(seconds))


def test_a_task_that_ends_its_process_is_noticed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(supervise, "supervise", lambda *args, **options: supervise.Outcome(0))
    with refused("task-ended-its-process", task="my_task.py"):
        given("tune", "my_task.py", device="cpu")


# -- train --settings ----------------------------------------------------------------------------


def train(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    return lockstep(
        "train",
        "my_task.py",
        "--device",
        "cpu",
        "--steps",
        "2",
        "--run",
        "run",
        "--settings",
        "tuned.json",
        *args,
        cwd=folder,
    )


def here(**changes: Any) -> Any:
    fields = {"task": "my_task", "overrides": {}, "workers": 2, "torch": torch.__version__}
    return replace(MEASURED, **{**fields, **changes})


def test_settings_from_a_file_are_applied_and_said_and_the_command_line_beats_them(
    folder: Path,
) -> None:
    tuned = {"update": "sharded", "threads": 2, "loader_workers": 1}
    Tuned(settings=tuned, measured=here(workers=8, torch="1.0", overrides={"place": "x"})).write(
        folder / "tuned.json"
    )
    done = train(folder, "--workers", "2", "--loader-workers", "0", "--bucket-mb", "3")
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    assert (
        lines[0]
        == "settings from tuned.json: update=sharded, threads=2; its loader_workers=1 gave way to"
        " loader_workers=0 of the command line"
    )
    assert (
        lines[1]
        == "warning: tuned.json was measured on something else (overrides={'place': 'x'} there"
        f" and {{}} here; workers=8 there and 2 here; torch=1.0 there and {torch.__version__}"
        " here): what is applied may not be the fastest here; run `lockstep tune` again"
    )
    assert lines[2] == "run directory: run"
    assert lines[3].endswith("in buckets of 3 MiB, sharded update, 2 threads a rank")
    assert ", sharded, " in done.stdout
    start = json.loads((folder / "run" / "metrics.jsonl").read_text().splitlines()[0])
    assert start["settings_file"] == "tuned.json"
    assert "2 threads a rank" in start["line"]
    settings = json.loads((folder / "run" / "settings.json").read_text())
    names = ("update", "threads", "loader_workers", "reduce", "settings_file")
    assert [settings[name] for name in names] == ["sharded", 2, 0, "auto", "tuned.json"]


def test_a_file_that_was_made_here_is_no_reason_to_warn(capsys: pytest.CaptureFixture[str]) -> None:
    settings = Settings(
        task="my_task.py", workers=2, device="cpu", update="sharded", settings_file="tuned.json"
    )
    tuned = Tuned(settings={"update": "sharded"}, measured=here())
    AppliedTuning(tuned=tuned, config=settings, given={}).say(settings)
    assert capsys.readouterr().err == "settings from tuned.json: update=sharded\n"
    AppliedTuning(tuned=replace(tuned, settings={}), config=settings, given={}).say(settings)
    assert capsys.readouterr().err == "settings from tuned.json: none\n"


def test_a_file_of_another_kind_starts_nothing(folder: Path) -> None:
    (folder / "tuned.json").write_text("[1]")
    done = train(folder)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(r"error: --settings tuned.json .* \[not-tuned-settings\]\n", done.stderr)
    assert not (folder / "run").exists()
