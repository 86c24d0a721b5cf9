"""The Tab key: asked as the shells ask, without torch, and by bash itself."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.command import process

ASKED = """
import contextlib, io, json, os, sys
from lockstep.cli import main
answers = {}
for line in json.load(sys.stdin):
    words = line.split(" ")
    os.environ |= {"COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)}
    os.environ |= {"_LOCKSTEP_COMPLETE": "complete_bash"}
    with contextlib.redirect_stdout(io.StringIO()) as out:
        try:
            main()
        except SystemExit as left:
            assert not left.code, left.code
    answers[line] = out.getvalue().split()
answers["heavy"] = sorted({"torch", "numpy", "sklearn"} & set(sys.modules))
print(json.dumps(answers))
"""
ANSWERS = {
    "lockstep ver": {"verify"},
    "lockstep train --chec": {"--checkpoint-every", "--checkpoints"},
    "lockstep train ": {"digits", "text", "mine.py"},
    "lockstep train digits --device ": {"auto", "cpu", "cuda"},
    "lockstep train digits --compress ": {"bf16", "fp16", "int8", "powersgd:"},
    "lockstep train digits --schedule g": {"gpipe"},
    "lockstep train digits --workers ": set(),  # a number: nothing to name
    "lockstep evaluate digits --run ": {"latest", "runs/a"},
    "lockstep report ": {"latest", "runs/a"},
    "lockstep checkpoints ": {"ls", "verify", "diff", "export"},
    "lockstep bench train digits --var": {"--variants"},
    "lockstep explain unknown-cod": {"unknown-code"},
    "lockstep run ": set(),  # a script: the shell completes files
}
BASH = """
source <(_LOCKSTEP_COMPLETE=source_bash ./lockstep)
COMP_WORDS=(./lockstep train digits --reduce ha)
COMP_CWORD=4
"$(complete -p lockstep | sed "s/.*-F //; s/ .*//")" ./lockstep
echo "${COMPREPLY[@]}"
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With a task, a run, and a folder that is no run."""
    (tmp_path / "mine.py").touch()
    (tmp_path / "runs" / "a").mkdir(parents=True)
    (tmp_path / "runs" / "a" / "settings.json").write_text("{}")
    (tmp_path / "runs" / "notes").mkdir()
    return tmp_path


def output(command: list[str], folder: Path, text: str = "") -> str:
    ended = subprocess.run(
        command, cwd=folder, input=text, capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    return ended.stdout


def test_names_and_values_are_completed_without_torch(folder: Path) -> None:
    answers = json.loads(output([sys.executable, "-c", ASKED], folder, json.dumps(list(ANSWERS))))
    assert answers.pop("heavy") == []
    assert {line: set(answer) for line, answer in answers.items()} == ANSWERS


def test_bash_completes_with_the_script_that_it_is_given_and_others_get_the_help_too(
    folder: Path,
) -> None:
    command = folder / "lockstep"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m lockstep "$@"\n')
    command.chmod(0o755)
    assert output(["bash", "--norc", "-c", BASH], folder) == "halving_doubling\n"
    asked = {"_TYPER_COMPLETE_ARGS": "lockstep ver", "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    for shell in ("zsh", "fish"):
        ended = process("", folder, _LOCKSTEP_COMPLETE=f"complete_{shell}", **asked)
        assert "verify" in ended.out
        assert "Check that the number of workers" in ended.out
