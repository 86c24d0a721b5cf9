"""`lockstep slurm`: what it takes for a task and what for a script, and mistakes that must not
wait in a queue.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from lockstep.errors import TaskError
from tests.cli.command import command
from tests.refused import refused


@pytest.fixture(autouse=True)
def _in_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def printed(capsys: pytest.CaptureFixture[str], target: str, *args: str, **options: object) -> str:
    command("slurm", target, *(["--", *args] if args else []), **options)
    return capsys.readouterr().out


def test_a_task(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "digits", "--exact", nodes=2, workers_per_node=4)
    assert (
        f"    {sys.executable} -P -m lockstep train digits --exact --run"
        f' {tmp_path}/runs/digits-"$SLURM_JOB_ID"\n' in text
    )
    assert f"--output={tmp_path}/logs/slurm-%j.log\n" in text
    assert (tmp_path / "logs").is_dir()


@pytest.mark.parametrize(
    "text",
    [
        "def task(): ...",
        "from others import make as task",
        "task = make",
        "if True:\n    task = 1",
        "from others import task",
    ],
)
def test_a_file_with_a_task(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    (tmp_path / "mine.py").write_text(text)
    assert f"lockstep train {tmp_path}/mine.py --run {tmp_path}/runs/mine-" in printed(
        capsys, "mine.py"
    )


@pytest.mark.parametrize(
    "text", ["print(1)", "def other():\n    def task(): ...", "class A:\n    def task(self): ..."]
)
def test_a_script(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    (tmp_path / "script.py").write_text(text)
    found = printed(capsys, "script.py", "--lr", "0.1 0.2", job_name="a b")
    assert f"lockstep run {tmp_path}/script.py --lr '0.1 0.2'\ncode=" in found
    assert "--job-name='a b'\n" in found


def test_a_run_directory_of_ones_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        printed(capsys, "digits", "--run", "here")
        .partition("train digits ")[2]
        .startswith("--run here\n")
    )


@pytest.mark.parametrize(
    ("target", "code"),
    [
        ("digit", "unknown-task"),
        ("nowhere.py", "task-file-missing"),
        ("broken.py", "task-file-not-python"),
    ],
)
def test_mistakes_in_the_task(tmp_path: Path, target: str, code: str) -> None:
    (tmp_path / "broken.py").write_text("def task(:")
    with refused(code, TaskError) as caught:
        command("slurm", target)
    assert target in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["broken.py"]


@pytest.mark.parametrize(
    ("args", "options", "code", "values"),
    [
        (["--exat"], {}, "unknown-option", {"option": "--exat", "command": "lockstep train"}),
        (["--epochs", "x"], {}, "wrong-argument", {"name": "--epochs", "given": " x"}),
        (["more"], {}, "wrong-command-line", {"command": "lockstep train"}),
        (["--help"], {}, "option-not-for-a-job", {"option": "--help"}),
        (["--workers", "4"], {}, "option-not-for-a-job", {"option": "--workers 4"}),
        (["--max-restarts", "1"], {}, "option-not-for-a-job", {"option": "--max-restarts 1"}),
        ([], {"job_name": "a\nb"}, "control-character", {"option": "--job-name", "value": "a\nb"}),
        ([], {"job_name": ""}, "empty-value", {"option": "--job-name"}),
        ([], {"time": "1h"}, "wrong-type", {"value": "1h"}),
        ([], {"nodes": 0}, "not-a-whole-number", {"name": "nodes", "value": 0}),
        (
            [],
            {"log": Path("file/logs")},
            "cannot-make-folder",
            {"option": "--log", "folder": Path("file/logs"), "reason": "Not a directory"},
        ),
    ],
)
def test_mistakes(
    tmp_path: Path,
    args: list[str],
    options: dict[str, object],
    code: str,
    values: dict[str, object],
) -> None:
    (tmp_path / "file").touch()
    with refused(code, **values) as caught:
        command("slurm", "digits", *(["--", *args] if args else []), **options)
    if args:
        assert str(caught.value).startswith("after --: ")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_without_sbatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with refused("no-sbatch"):
        command("slurm", "digits", submit=True)


def test_what_sbatch_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "sbatch").write_text("#!/bin/sh\necho no such partition >&2\nexit 1\n")
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(SystemExit, match="1"):
        command("slurm", "digits", submit=True)
    assert capsys.readouterr() == ("", "error: sbatch has refused the job: no such partition\n")
