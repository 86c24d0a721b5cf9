"""Whether a process still lives, and how to end one that a test has started, whatever state the
test left it in.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import psutil


def alive(process: psutil.Process | int) -> bool:
    """Whether it runs. It may end between the two questions that have to be asked, which psutil
    says in its own way.
    """
    try:
        found = psutil.Process(process) if isinstance(process, int) else process
        return found.is_running() and found.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_gone(processes: Iterable[psutil.Process | int], seconds: float = 20) -> None:
    """Until none of them runs."""
    deadline = time.monotonic() + seconds
    for process in processes:
        while alive(process):
            assert time.monotonic() < deadline, f"{process} is still there"
            time.sleep(0.01)


def kill(processes: Iterable[psutil.Process]) -> None:
    """Those that have not ended by themselves meanwhile."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def end(process: subprocess.Popen[Any]) -> None:
    """Kill it with all that descends from it, wait until they are gone, and close its pipes.

    A process of a process may hold them open, and outlive both: to wait for the end of what is
    written would be to wait for it. Where the process has ended already, its descendants are
    nobody's, and not found here.
    """
    everybody: list[psutil.Process] = []
    with suppress(psutil.NoSuchProcess):
        everybody = (
            psutil.Process(process.pid).children(recursive=True)
            if process.returncode is None
            else []
        )
    process.kill()
    kill(everybody)
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream is not None:
            with suppress(OSError):
                stream.close()
    process.wait()
    wait_gone(everybody)
