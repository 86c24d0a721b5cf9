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
from lockstep.config.settings import Settings
from lockstep.errors import UsageError


def _python(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *args], capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "args",
    [
        ["--help"],
        ["run", "--help"],
        ["plan", "--help"],
        ["show", "--help"],
        ["show", "data", "--help"],
        ["--version"],
    ],
)
def test_help_imports_nothing_heavy(args: list[str]) -> None:
    done = _python("-X", "importtime", "-m", "lockstep", *args)
    assert done.returncode == 0
    imported = {
        line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()
    }
    assert "typer" in imported
    assert imported.isdisjoint({"torch", "numpy", "rich", "sklearn"})


def test_help_names_every_command() -> None:
    done = _python("-m", "lockstep", "--help")
    assert {"run", "show", "plan"} <= set(re.findall(r"^  (\w+) ", done.stdout, re.M))
    assert done.stderr == ""


@pytest.mark.parametrize("name", sorted(app.COMMANDS))
def test_every_command_that_help_names_is_there(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["lockstep", name, "-h"])
    with pytest.raises(SystemExit) as left:
        app.main()
    assert not left.value.code
    assert capsys.readouterr().out.startswith(f"Usage: lockstep {name} ")


def test_a_command_imports_its_own_module_only() -> None:
    done = _python(
        "-c",
        "import sys; from lockstep.cli.app import app; app(['run', '-h'], standalone_mode=False);"
        " print([*sys.modules])",
    )
    assert "'lockstep.cli.run'" in done.stdout
    assert "'lockstep.cli.train'" not in done.stdout


TO_THE_RANKS = """
import json, sys
from lockstep.cli.app import main
from lockstep.launcher import supervise
class Started(BaseException): pass
def start(*args, **options): raise Started
supervise.supervise = start
found = {}
for line in json.load(sys.stdin):
    sys.argv = ["lockstep", *line.split()]
    try:
        main()
    except Started:
        found[line] = sorted({"torch", "numpy", "rich"} & set(sys.modules))
json.dump(found, sys.stdout)
"""


def test_a_command_that_starts_ranks_does_not_import_torch_itself(tmp_path: Path) -> None:
    (tmp_path / "script.py").touch()
    (tmp_path / "trained" / "checkpoints" / "step-0000002").mkdir(parents=True)
    Settings(task="digits", workers=1).write(tmp_path / "trained")
    lines = [
        "run --workers 2 script.py",
        "run -m json.tool",
        "train digits --device cpu --run run",
        "train digits --device cpu --workers 2 --run copied --checkpoints elsewhere",
        "evaluate digits --run trained --device cpu",
        "predict digits --run trained --device cpu --out predictions.npy",
    ]
    command = [sys.executable, "-c", TO_THE_RANKS]
    done = subprocess.run(
        command, cwd=tmp_path, input=json.dumps(lines), capture_output=True, text=True, check=False
    )
    assert json.loads(done.stdout) == {line: [] for line in lines}, done.stderr


def test_the_version() -> None:
    assert _python("-m", "lockstep", "--version").stdout == f"lockstep {package.__version__}\n"


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams_change_nothing(tmp_path: Path, closed: str) -> None:
    command = (
        f'"{sys.executable}" -m lockstep train digits --steps 2 --workers 2 --run run {closed}'
    )
    done = subprocess.run(
        ["sh", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "run" / "result.json").read_text())["steps"] == 2
    assert ("digits: " in done.stdout) == (closed == "2>&-")
    assert ("global batch" in done.stderr) == (closed == ">&-")


def test_a_usage_error_is_one_line_and_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(**options: object) -> None:
        raise UsageError("workers=0: give at least 1")

    monkeypatch.setattr(app, "app", refuse)
    with pytest.raises(SystemExit) as left:
        app.main()
    assert left.value.code == 2
    assert capsys.readouterr() == ("", "error: workers=0: give at least 1\n")
