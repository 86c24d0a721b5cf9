"""Command lines: in this process, in a process of their own, or many in one fresh interpreter."""

from __future__ import annotations

import inspect
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import typer

from lockstep.cli import app
from lockstep.cli.options import GroupedCommand, spread


def command(name: str, *words: str, **options: Any) -> None:
    """A command given in this process, as Python would call it: `command("train", "digits",
    reduce="ring")`. `set=["a=1", "b=2"]` is given twice; True is a flag. Raises what the command
    raises; SystemExit where it leaves with another code than 0.
    """
    line = [name]
    for option, value in options.items():
        for each in value if isinstance(value, list) else [value]:
            line += [f"--{option.replace('_', '-')}", *([] if each is True else [str(each)])]
    code = app.app([*line, *words], prog_name="lockstep", standalone_mode=False)
    if code:
        raise SystemExit(code)


def taken(function: Callable[..., None], *line: str) -> dict[str, Any]:
    """What a function that is declared as a command is given for a command line."""
    found: dict[str, Any] = {}

    def note(**values: Any) -> None:
        found.update(values)

    note.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
    note.__annotations__ = get_type_hints(function, include_extras=True)
    alone = typer.Typer(add_completion=False)
    alone.command("alone", cls=GroupedCommand)(spread(note))
    alone(list(line), standalone_mode=False)
    return found


@dataclass(frozen=True)
class Ended:
    """What is left of a command: its exit code and what it has printed."""

    code: int
    out: str
    err: str


Command = Callable[..., Ended]
"""`lockstep("train digits --workers 2")`: the line, or its words."""


def words_of(line: str | Sequence[str]) -> list[str]:
    return shlex.split(line) if isinstance(line, str) else [*line]


def exit_code(line: str | Sequence[str]) -> int:
    """Run `lockstep LINE` in this process, from main() to its exit code."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["lockstep", *words_of(line)])
        with pytest.raises(SystemExit) as left:
            app.main()
    return int(left.value.code or 0)


def process(line: str | Sequence[str], folder: Path | None = None, **variables: str) -> Ended:
    """Run `lockstep LINE` in a process of its own, in this folder and with these variables too."""
    ended = subprocess.run(
        [sys.executable, "-m", "lockstep", *words_of(line)],
        cwd=folder,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    return Ended(ended.returncode, ended.stdout, ended.stderr)


_FRESH = """
import contextlib, io, json, os, sys
from lockstep.cli.app import main
from lockstep.launcher import supervise

class Started(BaseException): ...

def start(*args, **options):
    raise Started

supervise.supervise = start
answers = []
for line in json.load(sys.stdin):
    sys.argv, before, text = ["lockstep", *line.split()], sorted(os.listdir(".")), io.StringIO()
    with contextlib.redirect_stderr(text), contextlib.redirect_stdout(text):
        try:
            main()
        except SystemExit as left:
            code = left.code or 0
        except Started:
            code = None
    heavy = [name for name in ("torch", "numpy", "rich", "sklearn") if name in sys.modules]
    commands = [name for name in sys.modules if name.startswith("lockstep.cli.")]
    written = sorted(os.listdir(".")) != before
    answers.append(dict(code=code, heavy=heavy, commands=commands, written=written, text=text.getvalue()))
print(json.dumps(answers))
"""


@dataclass(frozen=True)
class Answer:
    """What a command line came to in an interpreter that had imported nothing."""

    code: int | None
    """None if it came to the start of ranks."""
    heavy: list[str]
    """Packages that are imported by then and take long to import."""
    commands: list[str]
    """Modules of lockstep.cli that are imported by then."""
    written: bool
    """Whether the folder holds other names than before."""
    text: str


def in_a_fresh_interpreter(lines: Sequence[str], folder: Path) -> dict[str, Answer]:
    """Run all of them, one after the other. Ranks are not started."""
    ended = subprocess.run(
        [sys.executable, "-c", _FRESH],
        input=json.dumps(lines),
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    answers = [Answer(**answer) for answer in json.loads(ended.stdout)]
    return dict(zip(lines, answers, strict=True))
