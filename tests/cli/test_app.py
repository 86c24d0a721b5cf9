"""The command's frame: help, the version, and a user's mistake as one sentence. No command imports
more than it needs.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from typer.main import get_command

import lockstep as package
from lockstep import cli
from lockstep.cli import app
from lockstep.config.settings import Settings
from tests.cli.command import Answer, Command, in_a_fresh_interpreter
from tests.tools.report.runs import make

HELP = (
    "--help",
    "--version",
    "run --help",
    "plan --help",
    "show --help",
    "show data --help",
    "lint --help",
)
STARTS = (
    "run --workers 2 script.py",
    "run -m json.tool",
    "train digits --device cpu --run run",
    "train digits --device cpu --workers 2 --run copied --checkpoints elsewhere",
    "evaluate digits --run trained --device cpu",
    "predict digits --run trained --device cpu --out predictions.npy",
)
ALONE = ("report finished", "lint script.py")


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Answer]:
    folder = tmp_path_factory.mktemp("folder")
    (folder / "script.py").touch()
    (folder / "trained" / "checkpoints" / "step-0000002").mkdir(parents=True)
    Settings(task="digits", workers=1).write(folder / "trained")
    make(folder / "finished")
    return in_a_fresh_interpreter(["run -h", *HELP, *STARTS, *ALONE], folder)


def test_help_imports_nothing_heavy_and_its_own_command_only(answers: Mapping[str, Answer]) -> None:
    for line in HELP:
        assert (answers[line].code, answers[line].heavy) == (0, []), line
    assert "lockstep.cli.run" in answers["run -h"].commands
    assert "lockstep.cli.train" not in answers["run -h"].commands
    assert {"run", "show", "plan"} <= set(answers["--help"].text.split())
    assert answers["--help"].text.count("\n") <= 24
    assert answers["--version"].text == f"lockstep {package.__version__}\n"


def test_a_command_that_starts_ranks_does_not_import_torch_itself(
    answers: Mapping[str, Answer],
) -> None:
    for line in STARTS:
        assert (answers[line].code, answers[line].heavy) == (None, []), answers[line].text


def test_a_report_and_a_lint_need_no_torch(answers: Mapping[str, Answer]) -> None:
    for line in ALONE:
        assert answers[line].code == 0, answers[line].text
        assert "torch" not in answers[line].heavy


def test_every_command_that_help_names_is_there(lockstep: Command) -> None:
    for name in app.COMMANDS:
        ended = lockstep(f"{name} -h")
        assert (ended.code, ended.err) == (0, "")
        assert ended.out.startswith(f"Usage: lockstep {name} ")


@pytest.mark.parametrize("closed", ["<&- >&- 2>&-", pytest.param(">&-", marks=pytest.mark.rest)])
def test_closed_streams_change_nothing(tmp_path: Path, closed: str) -> None:
    line = f'"{sys.executable}" -m lockstep train digits --steps 2 --workers 2 --run run {closed}'
    ended = subprocess.run(
        ["sh", "-c", line], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert json.loads((tmp_path / "run" / "result.json").read_text())["steps"] == 2
    assert ended.stdout == ""
    assert ("global batch" in ended.stderr) == (closed == ">&-")


def parsed(line: str) -> str:
    """The command's name. Raises what the parser refuses."""
    root = get_command(app.app)
    with root.make_context("lockstep", shlex.split(line)[1:]) as context:
        name, command, rest = root.resolve_command(context, shlex.split(line)[1:])  # type: ignore[attr-defined]
        with command.make_context(name, rest, parent=context):
            return str(name)


def test_what_help_offers_to_try_are_commands(lockstep: Command) -> None:
    text = lockstep("").out
    tried = re.findall(r"^  (lockstep .+?)  ", text, re.MULTILINE)
    assert [parsed(line) for line in tried] == ["train", "verify", "show"]
    for name in ("run", "train", "verify", "plan"):
        text = lockstep(f"{name} --help").out
        examples = re.findall(r"^    (lockstep .+?)   ?\S", text, re.MULTILINE)
        assert len(examples) >= 3
        assert {parsed(line) for line in examples} == {name}


def test_an_exit_that_python_has_wrapped_is_that_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    """3.11 does so if a signal comes while a class with descriptors is being made."""

    class Asked:
        def __set_name__(self, owner: type, name: str) -> None:
            sys.exit(75)

    def make_a_class() -> None:
        type("Made", (), {"asked": Asked()})

    monkeypatch.setattr(app, "main", make_a_class)
    monkeypatch.setattr(cli, "_start_fork_server", lambda arguments: None)
    monkeypatch.setattr(sys, "argv", ["lockstep", "doctor"])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 75
