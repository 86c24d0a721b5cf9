"""Loader workers of a plain script, however processes are started: they end with it, leave
nothing, and say what is wrong.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil
import pytest

from lockstep.runtime import private
from tests.ending import end, wait_gone

pytestmark = pytest.mark.rest

METHODS = ("fork", "forkserver", "spawn")
SCRIPT = """
import multiprocessing, signal, sys, torch, lockstep
from torch.utils.data import TensorDataset

def main():
    with lockstep.init():
        loader = lockstep.Loader(TensorDataset(torch.zeros(4000, 2)), global_batch=4, micro_batch=2, num_workers=int(sys.argv[3]))
        for window in next(iter(loader.epochs(1))):
            for batch in window:
                pass
            print("ready", flush=True)
            exec(sys.argv[2])
"""
GUARDED = """
if __name__ == "__main__":
    multiprocessing.set_start_method(sys.argv[1])
    main()
"""
UNGUARDED = """
multiprocessing.set_start_method(sys.argv[1], force=True)
main()
"""


def started(
    folder: Path, how: str, method: str, does: str, workers: int = 1
) -> subprocess.Popen[str]:
    (folder / "script.py").write_text(SCRIPT + how)
    short = tempfile.mkdtemp()  # a socket's address may not be long, and pytest-xdist's folders are
    (folder / "temporary").symlink_to(short)
    command = [sys.executable, "script.py", method, does, str(workers)]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=folder, env={**os.environ, "TMPDIR": short}, **pipes)


@pytest.mark.parametrize("method", METHODS)
def test_workers_end_with_the_process_that_was_killed(tmp_path: Path, method: str) -> None:
    process = started(tmp_path, GUARDED, method, "signal.pause()", workers=2)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        workers = psutil.Process(process.pid).children(recursive=True)
        assert len(workers) >= 2
        process.kill()
        wait_gone(workers)
        # no launcher is there that would
        private.remove_torch_names([worker.pid for worker in workers])
    finally:
        end(process)


@pytest.mark.parametrize("method", METHODS)
def test_an_exception_leaves_nothing_in_the_temporary_folder(tmp_path: Path, method: str) -> None:
    process = started(tmp_path, GUARDED, method, "raise ValueError('mine')")
    _, err = process.communicate()
    assert process.returncode == 1
    assert err.rstrip().endswith("ValueError: mine")
    assert not list((tmp_path / "temporary").glob("pymp-*"))


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_a_script_that_workers_cannot_import_is_told_what_is_missing(
    tmp_path: Path, method: str
) -> None:
    process = started(tmp_path, UNGUARDED, method, "pass")
    _, err = process.communicate()
    assert process.returncode == 1
    last = err.rstrip().splitlines()[-1]
    assert f"ended at its start, because {method} makes it import the script" in last, err
    assert 'Put what the script does under `if __name__ == "__main__":`' in last
    assert last.endswith("[loader-worker-not-started]")
