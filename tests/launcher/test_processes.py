"""Processes from outside: what they do, and whether one was killed for memory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep.config.launching import Launch
from lockstep.launcher import failures, processes
from lockstep.launcher.preemption import Stop
from lockstep.launcher.processes import oom_kills
from lockstep.launcher.supervise import Watch
from lockstep.runtime import status
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


@pytest.mark.parametrize(("more", "number", "said"), [(2, 9, True), (0, 9, False), (1, 11, False)])
def test_a_kill_is_said_to_be_for_memory_only_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: int, number: int, said: bool
) -> None:
    counts = iter([5, 5 + more, 5 + more])
    monkeypatch.setattr(processes, "oom_kills", lambda: next(counts))
    found = Watch(tmp_path, Stop(), Launch()).explained(failures.of_exit(-number, 0, 100))
    text = failures.render(found)
    assert (f"cgroup oom_kill +{more}: the host's memory ran out" in text) is said
    assert signal.Signals(number).name in text


def test_a_rank_that_gloo_aborts_is_reported_with_the_shapes_of_all_ranks(tmp_path: Path) -> None:
    for rank in range(2):
        text = f"all_gather f32[{3 + 2 * rank},2] at train.py:23".encode()
        status.Page(status.file_of(tmp_path, rank)).call(text, status.EVERYBODY, True)
    watch = Watch(tmp_path, Stop(), Launch())
    assert watch.explained(failures.of_exit(-signal.SIGABRT, 0, 100), range(2)).note.endswith(
        "rank 0 all_gather f32[3,2] at train.py:23; rank 1 all_gather f32[5,2] at train.py:23"
    )


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
    assert processes.cpu_seconds(sleeper.pid) < 10
    sleeper.terminate()
    assert sleeper.wait() == -signal.SIGTERM
    assert processes.cpu_seconds(sleeper.pid) == 0


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
