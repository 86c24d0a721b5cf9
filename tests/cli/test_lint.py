"""`lockstep lint`: lines on stdout, JSON on request, and exit codes that a pre-commit hook can
use.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.command import Command

WRONG = "import torch.distributed as dist\nif dist.get_rank() == 0:\n    dist.barrier()\n"
PORT = 'os.environ["MASTER_PORT"] = "1234"\n'


@pytest.fixture(autouse=True)
def folder(tmp_path: Path) -> Path:
    (tmp_path / "clean.py").write_text("print(1)\n")
    (tmp_path / "wrong.py").write_text(WRONG)
    (tmp_path / "broken.py").write_text("def f(:\n")
    return tmp_path


def test_clean_is_one_line_and_0_and_a_finding_is_a_line_and_1(
    folder: Path, lockstep: Command
) -> None:
    ended = lockstep("lint clean.py --json findings.json")
    assert (ended.code, ended.out) == (0, "no mistakes found in 1 file\n")
    report = json.loads((folder / "findings.json").read_text())
    assert report == {"findings": [], "unreadable": []}
    ended = lockstep("lint clean.py wrong.py")
    assert ended.code == 1
    (line,) = ended.out.splitlines()
    assert line.startswith(
        "wrong.py:3: rank-conditional-collective: only rank 0 would reach dist.barrier()"
    )


def test_unreadable_is_a_sentence_and_2_and_the_others_are_still_checked(
    folder: Path, lockstep: Command
) -> None:
    ended = lockstep("lint clean.py broken.py wrong.py --json findings.json")
    assert ended.code == 2
    assert ended.out.count("\n") == 1
    assert ended.err.startswith("error: broken.py:1 is not valid Python: ")
    report = json.loads((folder / "findings.json").read_text())
    (finding,), (sentence,) = report["findings"], report["unreadable"]
    assert set(finding) == {"file", "line", "rule", "message"}
    where = (finding["file"], finding["line"], finding["rule"])
    assert where == ("wrong.py", 3, "rank-conditional-collective")
    assert "broken.py" in sentence


def test_fix_writes_what_is_safe_and_reports_the_rest(folder: Path, lockstep: Command) -> None:
    clean, wrong = folder / "clean.py", folder / "wrong.py"
    wrong.write_text(PORT + WRONG)
    clean.write_text(PORT)
    assert lockstep("lint clean.py").code == 1
    assert clean.read_text() == PORT  # nothing is written without --fix
    ended = lockstep("lint --fix clean.py wrong.py")
    assert ended.code == 1
    assert ended.out.splitlines()[:2] == ["clean.py: 1 fixed", "wrong.py: 1 fixed"]
    assert ended.out.count("\n") == 3
    assert wrong.read_text() == 'os.environ.setdefault("MASTER_PORT", "1234")\n' + WRONG
    assert lockstep("lint --fix clean.py").out == "no mistakes found in 1 file\n"
