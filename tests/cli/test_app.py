"""The command's frame: help without torch, the version, and a user's mistake as one sentence."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import lockstep as package
from lockstep.cli import app
from lockstep.errors import UsageError


def _python(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *args], capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "args",
    [["--help"], ["run", "--help"], ["tune", "--help"], ["plan", "--help"], ["show", "--help"], ["show", "data", "--help"], ["--version"]],
)
def test_help_imports_nothing_heavy(args: list[str]) -> None:
    done = _python("-X", "importtime", "-m", "lockstep", *args)
    assert done.returncode == 0
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}
    assert "typer" in imported
    assert imported.isdisjoint({"torch", "numpy", "rich", "sklearn"})


def test_help_names_every_command() -> None:
    done = _python("-m", "lockstep", "--help")
    assert {"run", "show", "tune", "plan"} <= set(re.findall(r"^  (\w+) ", done.stdout, re.M))
    assert done.stderr == ""


def test_the_version() -> None:
    assert _python("-m", "lockstep", "--version").stdout == f"lockstep {package.__version__}\n"


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams_change_nothing(tmp_path: Path, closed: str) -> None:
    command = f'"{sys.executable}" -m lockstep train digits --steps 2 --workers 2 --run run {closed}'
    done = subprocess.run(["sh", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "run" / "result.json").read_text())["steps"] == 2
    assert ("digits: " in done.stdout) == (closed == "2>&-")
    assert ("global batch" in done.stderr) == (closed == ">&-")


def test_a_usage_error_is_one_line_and_2(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(**options: object) -> None:
        raise UsageError("workers=0: give at least 1")

    monkeypatch.setattr(app, "app", refuse)
    with pytest.raises(SystemExit) as left:
        app.main()
    assert left.value.code == 2
    assert capsys.readouterr() == ("", "error: workers=0: give at least 1\n")
