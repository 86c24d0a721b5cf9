"""Private directories: nobody else's eyes, and nothing left although their owners may be killed."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from lockstep.launcher import private


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_a_run_directory_is_private_and_goes_with_the_run() -> None:
    def fail_inside() -> None:
        with private.run_directory() as directory:
            made.append(directory)
            assert stat.S_IMODE(directory.stat().st_mode) == 0o700
            (directory / "file").write_text("x")
            raise KeyboardInterrupt

    made: list[Path] = []
    with pytest.raises(KeyboardInterrupt):
        fail_inside()
    assert not made[0].exists()


def test_a_killed_runs_directory_goes_with_the_next_and_a_living_ones_stays(temporary: Path) -> None:
    code = "import os, signal; from lockstep.launcher import private\nwith private.run_directory(): os.kill(os.getpid(), signal.SIGKILL)"
    subprocess.run([sys.executable, "-c", code], env={**os.environ, "TMPDIR": str(temporary)}, check=False)
    (left,) = private.user_directory().iterdir()
    with private.run_directory() as mine:
        assert not left.exists()
        with private.run_directory() as other:
            assert mine.exists()
            assert other != mine


def test_start_time_tells_the_living_from_the_dead() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        assert private.start_time(process.pid) == private.start_time(process.pid) > 0
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert private.start_time(process.pid) == 0  # a zombie
    assert private.start_time(process.pid) == 0
