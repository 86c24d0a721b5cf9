"""Every test leaves the process as it found it: environment, process group, threads, child processes, shared memory.

A test of distributed code that leaves something behind breaks another one later, and that one gets the blame.
"""

from __future__ import annotations

import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import hypothesis
import psutil
import pytest
import torch._dynamo  # noqa: F401 - the first optimizer imports it, and it sets environment variables: not to be blamed on a test

from lockstep.testing.ranks import run_ranks

# A user's ranks have a minute. A loaded machine may take longer, and what hangs here is ended by the limit of its test.
run_ranks.__defaults__ = ((), None, timedelta(days=1))

hypothesis.settings.register_profile("lockstep", deadline=None)  # how long an example takes is the machine's affair
hypothesis.settings.load_profile("lockstep")

os.environ["LOCKSTEP_LOADAVG"] = str(Path(__file__).parent / "loadavg")  # of a quiet host: commands warn of a busy one

_PATIENCE_SECONDS = 30.0  # for what is ending on its own
_CLEARING_SECONDS = 120.0  # for the fixtures of a test, at its end
_AGAIN_SECONDS = 30.0  # until what was interrupted, and goes on waiting, is interrupted once more
_SHARED_MEMORY = Path("/dev/shm")


@pytest.hookimpl(wrapper=True)
def pytest_timeout_set_timer(settings: Any) -> Iterator[object]:
    """pytest-timeout interrupts a test once. One that waits again while it is unwound, as `with Popen(...)` does, is interrupted again."""
    done = yield
    if settings.method == "signal":
        signal.setitimer(signal.ITIMER_REAL, settings.timeout, _AGAIN_SECONDS)
    return done


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown() -> Iterator[object]:
    """pytest-timeout stops its timer at a failure, so a fixture's end could wait for ever: it has a limit of its own."""
    handler = signal.signal(signal.SIGALRM, _too_long)
    timer = signal.setitimer(signal.ITIMER_REAL, _CLEARING_SECONDS, _AGAIN_SECONDS)
    try:
        return (yield)
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, handler)


def _too_long(number: int, frame: object) -> None:
    pytest.fail(f"a fixture has not cleared away what it made within {_CLEARING_SECONDS:.0f} s")


@pytest.hookimpl(trylast=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Print a failure at once, and not only at the end: who ends a run before its end wants to know too."""
    if report.failed:
        sys.__stdout__.write(f"\n{report.nodeid} ({report.when}, {report.duration:.1f} s)\n{report.longreprtext}\n")  # type: ignore[union-attr]
        sys.__stdout__.flush()  # type: ignore[union-attr]


@pytest.fixture(scope="session", autouse=True)
def signals_as_in_a_terminal() -> None:
    """Under nohup and in a shell's background some are ignored, and every process that a test starts would ignore them too."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number is signal.SIGINT else signal.SIG_DFL)


@pytest.fixture(scope="session", autouse=True)
def unknown_names() -> Iterator[None]:
    """Names under .invalid are unknown at once: a resolver that cannot be reached would be asked for half a minute."""
    look_up = socket.getaddrinfo

    def known(host: Any, *args: Any, **options: Any) -> Any:
        if str(host).endswith(".invalid"):
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return look_up(host, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "getaddrinfo", known)
        yield


@pytest.fixture(autouse=True)
def nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail the test that leaves something behind, naming it."""
    environment, threads = _environment(), set(threading.enumerate())
    processes, segments = set(_children()), _segments()
    yield
    if request.node.get_closest_marker("kills"):
        _remove_torchs(_segments() - segments)
    left = [
        *_process_group(),
        *_until_empty(lambda: [f"thread {thread.name!r}" for thread in threading.enumerate() if thread not in threads]),
        *_until_empty(lambda: [f"process {_described(child)}" for child in _children() if child not in processes]),
        *_until_empty(lambda: [f"shared memory {name}" for name in _segments() - segments if not _used_by_others(name)]),
        *_differences(environment, _environment()),
    ]
    for child in _children():  # what is left here would hold the next tests up
        if child not in processes:
            with suppress(psutil.NoSuchProcess):
                child.kill()
    if left:
        pytest.fail("left behind: " + "; ".join(left), pytrace=False)


def _remove_torchs(names: set[str]) -> None:
    """torch's loader workers name a piece of memory for a moment: who is killed in that moment leaves the name behind."""
    for name in names:
        match = re.fullmatch(r"torch_(\d+)_.*", name)
        if match and not Path("/proc", match[1]).exists():
            Path("/dev/shm", name).unlink(missing_ok=True)


def _until_empty(look: Callable[[], list[str]]) -> list[str]:
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while (found := look()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return found


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}


def _differences(before: dict[str, str], after: dict[str, str]) -> list[str]:
    changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    os.environ.update({name: before[name] for name in changed if name in before})
    for name in changed - before.keys():
        del os.environ[name]
    return [f"environment variable {name}" for name in sorted(changed)]


def _process_group() -> list[str]:
    torch = sys.modules.get("torch")
    if torch is None or not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return []
    torch.distributed.destroy_process_group()
    return ["an open process group"]


def _children() -> list[psutil.Process]:
    """Living descendants, without the two servers that multiprocessing keeps for the whole session."""
    servers = {multiprocessing.forkserver._forkserver._forkserver_pid, multiprocessing.resource_tracker._resource_tracker._pid}
    found = []
    for child in psutil.Process().children(recursive=True):
        try:
            if child.pid not in servers and child.status() != psutil.STATUS_ZOMBIE:
                found.append(child)
        except psutil.NoSuchProcess:
            continue
    return found


def _described(child: psutil.Process) -> str:
    try:
        return f"{child.pid} ({' '.join(child.cmdline())})"
    except psutil.Error:
        return str(child.pid)


def _segments() -> set[str]:
    # Semaphores of multiprocessing have a name for an instant only, also those of other programs on this machine.
    return {name for name in os.listdir(_SHARED_MEMORY) if not name.startswith("sem.")} if _SHARED_MEMORY.is_dir() else set()


def _used_by_others(name: str) -> bool:
    """Whether a process that is not of this test session has the segment mapped; then it is none of our business."""
    ours = {os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))}
    for process in psutil.process_iter():
        try:
            if process.pid not in ours and any(name in entry.path for entry in process.memory_maps()):
                return True
        except psutil.Error:
            continue
    return False
