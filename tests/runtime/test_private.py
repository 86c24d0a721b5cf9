"""Private directories: nobody else's eyes, and nothing left although their owners may be killed."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

import pytest

from lockstep.runtime import private, processes


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


def test_a_killed_runs_directory_goes_with_the_next_and_a_living_ones_stays(
    temporary: Path,
) -> None:
    code = """
import os, signal
from lockstep.runtime import private
with private.run_directory():
    os.kill(os.getpid(), signal.SIGKILL)
"""
    env = {**os.environ, "TMPDIR": str(temporary)}
    with subprocess.Popen([sys.executable, "-c", code], env=env) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert private.start_time(process.pid) == 0  # a zombie
    assert private.start_time(process.pid) == 0
    assert private.start_time(os.getpid()) == private.start_time(os.getpid()) > 0
    (left,) = private.user_directory().iterdir()
    with private.run_directory() as directory:
        assert not left.exists()
        with private.run_directory() as other:
            assert directory.exists()
            assert other != directory


def test_two_launchers_may_remove_a_killed_runs_directory_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    glob = Path.glob

    def raced(folder: Path, pattern: str) -> Iterable[Path]:
        found = glob(folder, pattern)
        if pattern.startswith("rank-"):
            shutil.rmtree(folder)
            os.scandir(folder)
        return found

    monkeypatch.setattr(Path, "glob", raced)
    with private.run_directory() as directory:
        assert directory.is_dir()
    assert not directory.exists()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has /dev/shm")
def test_names_in_shared_memory_of_dead_loader_workers_go_with_the_runs_directory() -> None:
    pids = (2**22 + 1, os.getpid())  # no process has the first, on any system
    files = {pid: Path("/dev/shm", f"torch_{pid}_1_0") for pid in pids}
    try:
        with private.run_directory() as directory:
            for pid, file in files.items():
                processes.stack_of(directory, 0, pid).touch()
                file.touch()
        assert {pid for pid, file in files.items() if file.exists()} == {os.getpid()}
    finally:
        for file in files.values():
            file.unlink(missing_ok=True)
