"""The process that forks ranks: what it refuses to fork from, what it says where it cannot, and
that nothing of it is left.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from lockstep.launcher.fork_server import FOR_LAUNCHER
from lockstep.launcher.start import WARM, ForkServer, ServerGone
from tests.launcher.telling import of_itself
from tests.refused import refused


def _without_warm_server() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(WARM)}


@contextmanager
def _server(*imports: str, **variables: str) -> Iterator[ForkServer]:
    """One that imports as good as nothing."""
    with closing(ForkServer.start(imports, {**_without_warm_server(), **variables})) as server:
        yield server


@pytest.fixture(autouse=True)
def of_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes find the tests' modules."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))


def _told(server: ForkServer, **how: Any) -> Any:
    """What a child tells of itself: forked warm?, open files, streams."""
    reading, writing = os.pipe()
    with os.fdopen(reading) as stream:
        pid = server.fork(of_itself, (writing,), **how)
        os.close(writing)
        said = json.loads(stream.read())
    server.release(pid)
    return said


def test_a_child_has_its_own_descriptors_and_no_other_and_is_fresh_where_it_must_be() -> None:
    """As a user's module does that is named like an imported one."""
    with _server("colorsys") as server:
        for options, fresh in (
            ({"cold": False}, False),
            ({"cold": True}, True),
            ({"beside": ["colours"]}, False),
            ({"beside": ["colorsys"]}, True),
        ):
            warm, opened, _ = _told(server, **options)
            assert (warm, len(opened), opened[:3]) == (not fresh, 4, [0, 1, 2])
        # a system that lets it fork no more is named, nothing is left open, and it goes on
        before = len(os.listdir(f"/proc/{server.pid}/fd"))
        soft, hard = resource.prlimit(server.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (5, hard))
        with refused("process-not-started", ServerGone, why="Too many open files"):
            server.fork(of_itself)
        resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (soft, hard))
        assert len(os.listdir(f"/proc/{server.pid}/fd")) == before
        assert _told(server)


_STARTS_A_THREAD = """
import threading, time
threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
"""


def test_what_an_import_starts_forbids_forking(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for name, does, said in (
        ("starts", _STARTS_A_THREAD, "has started a thread"),
        ("passes", "pass", ""),
        ("fails", "raise RuntimeError('is said by the rank that imports it')", ""),
    ):
        (tmp_path / f"{name}.py").write_text(does)
        with _server(name, PYTHONPATH=f"{tmp_path}:{os.environ['PYTHONPATH']}") as server:
            server.ready()
            stderr = capfd.readouterr().err
            assert (name in stderr, said in stderr) == (bool(said), True)
            assert _told(server)[0] is not bool(said)


def _with_arrow(descriptor: int) -> None:
    """Allocate with the thread's allocator in a forked process, from several threads."""
    import pyarrow

    pool = pyarrow.jemalloc_memory_pool()
    sizes = [1, 5_000, 3_000_000] * 20
    with ThreadPoolExecutor(4) as threads:
        buffers = list(threads.map(lambda size: pyarrow.allocate_buffer(size, pool), sizes))
    answer = ["fresh" not in sys.orig_argv, sum(map(len, buffers))]
    os.write(descriptor, json.dumps(answer).encode())


@pytest.mark.rest
def test_an_allocators_thread_does_not_forbid_forking(capfd: pytest.CaptureFixture[str]) -> None:
    """pandas and scikit-learn import pyarrow, whose jemalloc has a thread."""
    with _server("pyarrow") as server:
        server.ready()
        assert capfd.readouterr().err == ""
        threads = Path(f"/proc/{server.pid}/task").glob("*/comm")
        assert "jemalloc_bg_thd\n" in [each.read_text() for each in threads]
        for _ in range(3):
            assert json.loads(server.answer(_with_arrow)) == [True, 20 * 3_005_001]


def _blocked_signals(descriptor: int) -> None:
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    os.write(descriptor, json.dumps(sorted(blocked)).encode())


def _leave_with_7() -> None:
    os._exit(7)


def test_a_schedulers_signal_to_all_ends_no_server_and_an_ended_process_keeps_its_pid() -> None:
    """Until it is released. The signal reaches no later child either."""
    with _server() as server:
        server.ready()
        for number in FOR_LAUNCHER:
            os.kill(server.pid, number)
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])
        assert json.loads(server.answer(_blocked_signals)) == sorted(blocked)
        pid = server.fork(_leave_with_7)
        while server.codes([pid]) == {pid: None}:
            server.wait(60)  # until it ends
        assert server.codes([pid]) == {pid: 7}
        assert psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
        server.release(pid)
        assert not psutil.pid_exists(pid)


def _hear_for_ever(server: ForkServer) -> None:
    while True:
        server.wait(1)


def test_one_that_is_killed_is_named_and_takes_its_children_along(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with _server() as server:
        pid = server.fork(signal.pause)
        child = psutil.Process(pid)
        os.kill(server.pid, signal.SIGKILL)
        with refused("fork-server-gone", ServerGone, pid=server.pid) as caught:
            _hear_for_ever(server)
        assert "SIGKILL" in str(caught.value)
        child.wait(10)
    assert capfd.readouterr().err == ""


def test_streams_that_the_caller_has_closed_are_empty(tmp_path: Path) -> None:
    said = tmp_path / "said"
    with subprocess.Popen(
        [sys.executable, "-c", _DAEMON, str(said)], env=_without_warm_server()
    ) as daemon:
        assert daemon.wait() == 0
    assert json.loads(said.read_text())[2] == ["/dev/null"] * 3


_DAEMON = """
import os, sys
from pathlib import Path
from lockstep.launcher.start import ForkServer
from tests.launcher.telling import of_itself

for number in range(3):
    os.close(number)
server = ForkServer.start([], os.environ)
Path(sys.argv[1]).write_bytes(server.answer(of_itself))
server.close()
"""
