"""`lockstep lint`: lines on stdout, JSON on request, and exit codes that a pre-commit hook can use."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lockstep.cli.app import app
from lockstep.errors import UsageError

WRONG = "import torch.distributed as dist\nif dist.get_rank() == 0:\n    dist.barrier()\n"


@pytest.fixture
def scripts(tmp_path: Path) -> tuple[str, str, str]:
    clean, wrong, broken = tmp_path / "clean.py", tmp_path / "wrong.py", tmp_path / "broken.py"
    clean.write_text("print(1)\n")
    wrong.write_text(WRONG)
    broken.write_text("def f(:\n")
    return str(clean), str(wrong), str(broken)


def test_clean_is_one_line_and_0(scripts: tuple[str, str, str]) -> None:
    done = CliRunner().invoke(app, ["lint", scripts[0]])
    assert (done.exit_code, done.output) == (0, "no mistakes found in 1 file\n")
    assert CliRunner().invoke(app, ["lint", scripts[0], scripts[0]]).output == "no mistakes found in 2 files\n"


def test_a_finding_is_a_line_and_1(scripts: tuple[str, str, str]) -> None:
    done = CliRunner().invoke(app, ["lint", scripts[0], scripts[1]])
    assert done.exit_code == 1
    (line,) = done.stdout.splitlines()
    assert line.startswith(f"{scripts[1]}:3: rank-conditional-collective: only rank 0 would reach dist.barrier()")


def test_unreadable_is_a_sentence_and_2_and_the_others_are_still_checked(scripts: tuple[str, str, str]) -> None:
    done = CliRunner().invoke(app, ["lint", scripts[2], scripts[1]])
    assert done.exit_code == 2
    assert done.stdout.count("\n") == 1
    assert done.stderr.startswith(f"error: {scripts[2]}:1: not Python 3.")


def test_json(scripts: tuple[str, str, str], tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    assert CliRunner().invoke(app, ["lint", *scripts, "--json", str(file)]).exit_code == 2
    content = json.loads(file.read_text())
    ((finding,), (sentence,)) = content["findings"], content["unreadable"]
    assert (finding["file"], finding["line"], finding["rule"]) == (scripts[1], 3, "rank-conditional-collective")
    assert set(finding) == {"file", "line", "rule", "message"}
    assert scripts[2] in sentence


def test_json_of_nothing(scripts: tuple[str, str, str], tmp_path: Path) -> None:
    assert CliRunner().invoke(app, ["lint", scripts[0], "--json", str(tmp_path / "found.json")]).exit_code == 0
    assert json.loads((tmp_path / "found.json").read_text()) == {"findings": [], "unreadable": []}


def test_json_that_cannot_be_written(scripts: tuple[str, str, str], tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["lint", scripts[0], "--json", str(tmp_path / "missing" / "found.json")])
    assert isinstance(done.exception, UsageError)
    assert "cannot be written: No such file" in str(done.exception)


def test_it_imports_no_torch(scripts: tuple[str, str, str]) -> None:
    code = "import sys; from lockstep.lint import check_file; from pathlib import Path; check_file(Path(sys.argv[1])); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, scripts[1]], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
