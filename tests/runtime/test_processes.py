"""Processes from outside: what they do, and whether one was killed for memory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from lockstep.runtime import processes
from lockstep.runtime.processes import oom_kills
from tests.ending import end


def group(folder: Path, kills: int) -> tuple[Path, Path]:
    (folder / "groups" / "a" / "b").mkdir(parents=True, exist_ok=True)
    (folder / "groups" / "a" / "b" / "memory.events").write_text(
        f"low 0\noom 4\noom_kill {kills}\noom_group_kill 0\n"
    )
    (folder / "cgroup").write_text("12:cpu:/x\n0::/a/b\n")
    return folder / "cgroup", folder / "groups"


def test_what_the_group_counts(tmp_path: Path) -> None:
    assert oom_kills(*group(tmp_path, 3)) == 3
    (tmp_path / "groups" / "a" / "b" / "memory.events").write_text("low 0\n")
    assert oom_kills(tmp_path / "cgroup", tmp_path / "groups") == 0
    (tmp_path / "cgroup").write_text("12:cpu:/x\n")
    assert oom_kills(tmp_path / "cgroup", tmp_path / "groups") == 0
    assert oom_kills(tmp_path / "nowhere") == 0


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[str]]:
    """A process that sleeps, which the system says of it by now, and that handles no signal."""
    code = "import time; print(flush=True); time.sleep(1000)"
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        while "sleep" not in processes.activity(process.pid):
            pass
        yield process
        process.kill()


def test_a_process_that_sleeps_is_in_a_system_call_uses_no_processor_and_is_asked_for_no_stack(
    sleeper: subprocess.Popen[str], tmp_path: Path
) -> None:
    """The signal would end it, as it does not handle it."""
    (tmp_path / "stack").touch()
    assert processes.ask_for_stack(sleeper.pid, tmp_path / "stack") == ""
    assert processes.activity(sleeper.pid) == "in a system call (sleep)"
    assert processes.cpu_seconds([sleeper.pid])[sleeper.pid] < 10
    sleeper.terminate()
    assert sleeper.wait() == -signal.SIGTERM
    assert processes.cpu_seconds([sleeper.pid]) == {sleeper.pid: 0}


def test_processor_seconds_of_descendants_count_and_the_host_is_read_once(
    sleeper: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    work = "import time\nwhile time.process_time() < 0.3: pass\nprint(flush=True); input()"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {work!r}])"
    command = [sys.executable, "-c", code]
    reads: list[None] = []
    process_iter = psutil.process_iter
    monkeypatch.setattr(psutil, "process_iter", lambda: reads.append(None) or process_iter())
    with subprocess.Popen(command, stdin=-1, stdout=-1, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()
        used = processes.cpu_seconds([sleeper.pid, process.pid])
        process.stdin.write("\n")
    assert used[process.pid] > 0.25 + used[sleeper.pid]
    assert len(reads) == 1


def test_a_process_that_waits_for_a_core_is_queued(sleeper: subprocess.Popen[str]) -> None:
    """Two programs want the same core. One that sleeps wants none."""
    core = min(os.sched_getaffinity(0))
    code = f"import os; os.sched_setaffinity(0, {{{core}}})\nwhile True: pass"
    busy = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(2)]
    try:
        before = processes.queued_seconds(sleeper.pid)
        while processes.queued_seconds(busy[0].pid) < 0.5:
            assert busy[0].poll() is None
        assert processes.queued_seconds(sleeper.pid) - before < 0.1
    finally:
        for process in busy:
            end(process)
    assert processes.queued_seconds(busy[0].pid) == 0
