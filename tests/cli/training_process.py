"""`lockstep train my_task.py` as a process in a folder of its own: started, waited for, looked
at, and ended.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from tests.ending import end, kill, wait_gone

_KNOWN = """
the_task = task

def task():
    rank = os.environ.get("RANK")
    if rank is not None:
        Path(f"pid-{rank}").write_text(str(os.getpid()))
    return the_task()
"""
"""Behind a task: each rank names itself. The environment of a forked process cannot be seen from
outside.
"""


class TrainingProcess:
    """One after the other, all over one run directory, "run". `options` go to each of them."""

    def __init__(self, folder: Path, task: str, *options: str) -> None:
        self.folder = folder
        self.process: subprocess.Popen[str] | None = None
        self._options = options
        # not in `folder`: what lies there has paths too long for sockets
        self.temporary = Path(tempfile.mkdtemp())
        (folder / "my_task.py").write_text(task + _KNOWN)

    def start(self, workers: int | str = 2, *options: str) -> None:
        line = f"-m lockstep train my_task.py --workers {workers} --run run"
        self.process = subprocess.Popen(
            [sys.executable, *line.split(), *self._options, *options],
            cwd=self.folder,
            env={**os.environ, "TMPDIR": str(self.temporary)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def until(self, there: Callable[[], bool]) -> None:
        assert self.process is not None
        deadline = time.monotonic() + 300
        while not there():
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.005)

    def records(self, kind: str = "step") -> list[dict[str, Any]]:
        """Whole lines of metrics.jsonl: while it is written to, the last may be half of one."""
        metrics = self.folder / "run" / "metrics.jsonl"
        if not metrics.exists():
            return []
        found = [
            json.loads(line)
            for line in metrics.read_text().splitlines(keepends=True)
            if line.endswith("\n")
        ]
        return [each for each in found if each["kind"] == kind]

    def everybody(self) -> list[psutil.Process]:
        """All that the training has started, wherever they hang in the process tree, then the
        launcher.
        """
        assert self.process is not None
        started = [
            each
            for each in psutil.process_iter(["cwd"])
            if each.info["cwd"] == str(self.folder) and each.pid != self.process.pid
        ]
        return [*started, psutil.Process(self.process.pid)]

    def rank(self, number: int) -> psutil.Process:
        return psutil.Process(int((self.folder / f"pid-{number}").read_text()))

    def end(self) -> tuple[int, str, str]:
        """Exit code, stdout, stderr."""
        assert self.process is not None
        out, err = self.process.communicate()
        return self.process.returncode, out, err


@contextmanager
def nobody_left(training: TrainingProcess) -> Iterator[TrainingProcess]:
    """Of all that was started in its folder nothing lives in the end, and no directory of a
    loader worker that was killed lies about.
    """
    yield training
    if training.process is not None:
        end(training.process)
    left = [
        process
        for process in psutil.process_iter(["cwd"])
        if process.info["cwd"] == str(training.folder)
    ]
    try:
        wait_gone(left)
        assert not list(training.temporary.glob("pymp-*"))
    finally:
        kill(left)
        shutil.rmtree(training.temporary)
