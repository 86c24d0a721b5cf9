"""What a test, or a function on a team's rank, has to leave as it was: environment variables, threads,
processes, process groups, shared memory, torch's settings.

A test of distributed code that leaves something behind breaks another one later, and that one gets
the blame.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

_SHARED_MEMORY = Path("/dev/shm")
_LISTS_CHILDREN = Path(f"/proc/self/task/{os.getpid()}/children").exists()


class LeftBehind(Exception):
    """Something was left behind; the message lists it."""


@contextmanager
def nothing_left(
    servers: Callable[[], Collection[int]] = tuple,
    patience: float = 30.0,
) -> Iterator[None]:
    """Raise LeftBehind for what the block leaves behind in this process, and clear it away.

    Args:
        servers: returns the pids of processes that stay, and may be started in the block.
        patience: the seconds that threads, processes and shared memory have to end on their own.
    """
    environment, settings, segments = _environment(), _settings(), _segments()
    threads = set(threading.enumerate())
    processes = set(_children(servers()))
    groups = _process_groups()
    strangers = set(os.listdir("/proc")) - {str(os.getpid()), *map(str, _descendants(os.getpid()))}
    yield

    def new_threads() -> list[str]:
        return [f"thread {t.name!r}" for t in threading.enumerate() if t not in threads]

    def new_processes() -> list[psutil.Process]:
        return [child for child in _children(servers()) if child not in processes]

    def new_segments() -> list[str]:
        return [
            name
            for name in _segments() - segments
            # torch's names hold the pid of the process that made them
            if not strangers.intersection(name.split("_")) and not _used_by_others(name)
        ]

    left = [
        *_changed("environment variable", environment, _environment()),
        *_changed("torch's", settings, _settings()),
    ]
    deadline = time.monotonic() + patience
    for new in (
        new_threads,
        lambda: [f"process {_described(child)}" for child in new_processes()],
        lambda: [f"shared memory {name}" for name in new_segments()],
    ):
        while (names := new()) and time.monotonic() < deadline:
            time.sleep(0.01)
        left += names
    if _process_groups() > groups:
        left.append("an open process group")
    if left:
        os.environ.clear()
        os.environ.update(environment)
        for child in new_processes():  # it would hold the next tests up
            with suppress(psutil.NoSuchProcess):
                child.kill()
        raise LeftBehind("left behind: " + "; ".join(left))


def _changed(kind: str, before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    names = sorted(before.keys() | after.keys())
    return [f"{kind} {name}" for name in names if before.get(name) != after.get(name)]


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}


def _settings() -> dict[str, Any]:
    torch = sys.modules.get("torch")
    if torch is None:
        return {}
    return {
        "default dtype": torch.get_default_dtype(),
        "intra-op threads": torch.get_num_threads(),
        "gradients": torch.is_grad_enabled(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
    }


def _process_groups() -> int:
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available():
        return 0
    return len(distributed.distributed_c10d._world.pg_map)


def _children(spared: Collection[int]) -> list[psutil.Process]:
    """Return the living descendants of this process, without the spared ones and theirs."""
    children = []
    for pid in _descendants(os.getpid(), spared):
        with suppress(psutil.NoSuchProcess):
            child = psutil.Process(pid)
            if child.status() != psutil.STATUS_ZOMBIE:
                children.append(child)
    return children


def _descendants(pid: int, spared: Collection[int] = ()) -> set[int]:
    """The kernel lists a thread's children. A look at all processes of the machine, as psutil's,
    costs more than most tests.
    """
    if not _LISTS_CHILDREN:
        return {child.pid for child in psutil.Process(pid).children(recursive=True)} - {*spared}
    children = None
    while (now := children_of(pid)) != children:
        # one that ends while the list is read hides others
        children = now
    return now.difference(spared).union(*(_descendants(child, spared) for child in now))


def children_of(pid: int) -> set[int]:
    """Return the pids of a process's children."""
    children: set[int] = set()
    with suppress(OSError):  # the process has ended
        for thread in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError), open(f"/proc/{pid}/task/{thread}/children") as file:
                children.update(map(int, file.read().split()))
    return children


def _described(child: psutil.Process) -> str:
    try:
        return f"{child.pid} ({' '.join(child.cmdline())})"
    except psutil.Error:
        return str(child.pid)


def _segments() -> set[str]:
    # Semaphores of multiprocessing have a name for an instant only, also those of other programs on
    # this machine.
    if not _SHARED_MEMORY.is_dir():
        return set()
    return {name for name in os.listdir(_SHARED_MEMORY) if not name.startswith("sem.")}


def _used_by_others(name: str) -> bool:
    """Whether a process that is not of this test session has the segment mapped; then it is none
    of our business.
    """
    ours = {os.getpid(), *_descendants(os.getpid())}
    for process in psutil.process_iter():
        try:
            if process.pid not in ours and any(
                name in entry.path for entry in process.memory_maps()
            ):
                return True
        except psutil.Error:
            continue
    return False
