"""`lockstep run` from the outside: arguments, codes, sentences."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


def lockstep(*args: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "lockstep", *args], cwd=cwd, capture_output=True, text=True, timeout=60, check=False)


def test_arguments_pass_through_untouched(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import os, sys; print(os.environ['RANK'], sys.argv)")
    theirs = ["--workers", "3", "-m", "--help", "a b", "", "$HOME", "$$", "${local_rank}", "--", "-x", "*"]
    done = lockstep("run", "--workers", "2", "script.py", *theirs, cwd=tmp_path)
    assert done.stderr == ""
    assert sorted(done.stdout.splitlines()) == [f"{rank} {['script.py', *theirs]}" for rank in (0, 1)]


def test_a_module_and_one_worker_by_default(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "train.py").write_text("import os, sys; print(os.environ['WORLD_SIZE'], sys.argv[1:], __name__)")
    done = lockstep("run", "--workers", "1", "-m", "package.train", "--workers", "5", cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "1 ['--workers', '5'] __main__\n", "")


def test_the_exit_code_is_the_ranks_own(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("raise SystemExit(5)")
    assert lockstep("run", "-n", "1", "script.py", cwd=tmp_path).returncode == 5


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["run"], "error: nothing to run: give a script"),
        (["run", "nowhere.py"], "error: script 'nowhere.py' does not exist"),
        (["run", "--workers", "0", "-m", "this"], "error: workers=0: give at least 1"),
        (["run", "--wrokers", "2", "x.py"], "--wrokers"),
        (["run", "--workers", "two", "x.py"], "Invalid value for '--workers'"),
    ],
)
def test_mistakes_are_sentences_with_code_2(args: list[str], message: str, tmp_path: Path) -> None:
    done = lockstep(*args, cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
