"""`lockstep bench scaling` from the outside: tables, JSON and a picture of real ranks, and a
sentence for every mistake.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from lockstep.cli import bench
from lockstep.cli.app import app
from lockstep.tools.bench import scaling as module

TASK = """
from tests.training import toy

def task(global_batch: int = 8):
    return toy.task(global_batch=global_batch, micro_batch=2)
"""
COLUMNS = {
    *(
        "workers",
        "samples_per_s",
        "low",
        "high",
        "speedup",
        "efficiency",
        "threads",
        "step_ms",
    ),
}


def scaling(*args: str) -> Result:
    return CliRunner().invoke(app, ["bench", "scaling", *args])


def test_weak_scaling_with_json_and_a_picture(tmp_path: Path) -> None:
    (tmp_path / "small.py").write_text(TASK)
    command = [
        sys.executable,
        "-m",
        "lockstep",
        "bench",
        "scaling",
        str(tmp_path / "small.py"),
        "--workers",
        "1,2",
        "--weak",
        "--set",
    ]
    command += [
        "global_batch=16",
        "--steps",
        "2",
        "--rounds",
        "2",
        "--threads",
        "1",
        "--device",
        "cpu",
        "--no-loading",
    ]
    command += ["--json", str(tmp_path / "figures.json"), "--out", str(tmp_path / "scaling.svg")]
    done = subprocess.run(
        command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "weak scaling: the batch of a rank stays 16 (8 micro-batches of 2)" in done.stdout
    assert "loading is not timed" in done.stdout
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["mode"] == "weak"
    assert [row["workers"] for row in figures["rows"]] == [1, 2]
    for row in figures["rows"]:
        assert set(row) == COLUMNS
        assert row["speedup"] == row["samples_per_s"] / figures["rows"][0]["samples_per_s"]
        assert row["efficiency"] == row["speedup"] / row["workers"]
    assert (tmp_path / "scaling.svg").read_text().startswith("<svg")


def test_options_reach_the_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    class Done(Exception):
        pass

    def instead(task: str, workers: list[int], **options: Any) -> None:
        seen.update(options, task=task, workers=workers)
        raise Done

    monkeypatch.setattr(module, "benchmark_scaling", instead)
    given = [
        "--workers",
        "2,1",
        "--weak",
        "--steps",
        "7",
        "--rounds",
        "3",
        "--threads",
        "2",
        "--no-loading",
        "--loader-workers",
        "1",
    ]
    given += [
        "--set",
        "lr=1",
        "--device",
        "cpu",
        "--reduce",
        "native",
        "--compress",
        "bf16",
        "--update",
        "sharded",
    ]
    assert isinstance(scaling("digits", *given).exception, Done)
    assert seen == {
        "task": "digits",
        "workers": [2, 1],
        "mode": "weak",
        "steps": 7,
        "rounds": 3,
        "threads": 2,
        "loading": False,
        "loader_workers": 1,
        "overrides": {"lr": "1"},
        "device": "cpu",
        "reduce": "native",
        "compress": "bf16",
        "update": "sharded",
        "exact": False,
    }
    assert isinstance(scaling("digits", "--exact").exception, Done)
    assert (seen["exact"], seen["compress"]) == (True, None)
    assert isinstance(scaling("digits").exception, Done)
    assert (seen["mode"], seen["workers"][:2], seen["loading"]) == ("strong", [1, 2], True)


def test_by_default_powers_of_two_up_to_the_gpus_else_the_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("lockstep.runtime.cores.cores", lambda: 6)
    monkeypatch.setattr("lockstep.launcher.start.gpus", lambda: 0)
    assert bench._powers_of_two("auto") == [1, 2, 4]
    monkeypatch.setattr("lockstep.launcher.start.gpus", lambda: 8)
    assert (bench._powers_of_two("auto"), bench._powers_of_two("cpu")) == (
        [1, 2, 4, 8],
        [1, 2, 4],
    )
    monkeypatch.setattr("lockstep.runtime.cores.cores", lambda: 1)
    assert bench._powers_of_two("cpu") == [1, 2]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["digits", "--workers", "0"], "workers='0': give numbers of workers of at least 1"),
        (["digits", "--workers", "2,1,x"], "workers='2,1,x': give numbers of workers"),
        (["digits", "--workers", ""], "workers='': give numbers"),
        (["digits", "--workers", "2,2"], "workers=2,2: 2 is given twice"),
        (
            ["digits", "--workers", "1,2", "--steps", "0"],
            "steps=0: give a whole number of at least 1",
        ),
        (
            ["digits", "--workers", "1,2", "--json", "/nowhere/x"],
            "--json /nowhere/x cannot be written",
        ),
        (["digit", "--workers", "1,2"], "task 'digit' is unknown"),
        (["nothing.py"], "task file 'nothing.py' does not exist"),
        (
            ["digits", "--workers", "1,2", "--set", "lr"],
            "--set: 'lr' is not a pair. Write name=value",
        ),
    ],
)
def test_mistakes_are_told_before_any_rank_starts(
    monkeypatch: pytest.MonkeyPatch, args: list[str], message: str
) -> None:
    monkeypatch.setattr(module, "launch", None)
    done = scaling(*args)
    assert message in str(done.exception)
