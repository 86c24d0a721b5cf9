"""A program that is over and a process that is not: who waits for which thread, started where,
and what Ctrl-C then does.
"""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from lockstep.launcher import ending
from lockstep.launcher.ending import Blocker, EndWatcher
from lockstep.runtime import processes, status
from tests import pages
from tests.ending import end
from tests.launcher.conftest import Run

HERE, GO = threading.Event(), threading.Event()


def upload(what: str) -> None:
    HERE.set()
    GO.wait()


LINE = upload.__code__.co_firstlineno


class Uploader(threading.Thread):
    def run(self) -> None:
        upload("x")


PARTIAL = threading.Thread(target=functools.partial(upload, "x"))


@pytest.mark.parametrize(
    ("thread", "runs"),
    [
        (PARTIAL, f"upload, test_ending.py:{LINE}"),
        (Uploader(), f"Uploader.run, test_ending.py:{Uploader.run.__code__.co_firstlineno}"),
    ],
)
def test_a_thread_is_named_with_what_it_runs_and_where_it_is(
    thread: threading.Thread, runs: str
) -> None:
    thread.name = "uploader"
    daemon = threading.Thread(target=upload, args=("x",), name="a daemon", daemon=True)
    try:
        for started in (thread, daemon):
            started.start()
            assert HERE.wait(60)
            HERE.clear()
        held = ending.find_blocker()
    finally:
        GO.set()
        thread.join()
        daemon.join()
        GO.clear()
    now = f"now at test_ending.py:{LINE + 2} upload"
    assert held.reason == f"the thread 'uploader' (runs {runs}; {now})"
    assert held.stack.startswith("Stack of 'uploader':\n")
    assert f'  File "{__file__}", line {LINE + 2}, in upload\n    GO.wait()' in held.stack


def test_without_a_thread_it_is_an_exit_handler_or_lockstep_itself_is_slow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held: list[Blocker | None] = []
    for package in (ending.PACKAGE, threading.__file__):
        monkeypatch.setattr(ending, "PACKAGE", package)
        watch = threading.Thread(target=lambda: held.append(ending.find_blocker()), daemon=True)
        watch.start()
        watch.join()
    handler, slow = held
    assert handler is not None
    assert slow is None
    assert "exit handler" in handler.reason
    assert "test_without_a_thread_it_is_an_exit_handler" in handler.stack


class Launcher:
    """One that looks at three ranks in `folder`, whose pages say that their programs are over."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.now = folder, 0.0
        self.endings = EndWatcher(folder, lambda: self.now)

    def over(self, rank: int) -> None:
        pages.enter(status.Page(status.file_of(self.folder, rank)), "end")

    def look(self) -> list[str]:
        self.now += 10
        return self.endings.check({rank: os.getpid() for rank in range(3)})


def test_ranks_that_wait_for_the_same_are_named_together_and_once(tmp_path: Path) -> None:
    launcher = Launcher(tmp_path)
    assert launcher.look() == []
    for rank, what in ((0, "the thread 'a'"), (1, "the thread 'b'"), (2, "the thread 'a'")):
        ending.write_report(tmp_path, rank, Blocker(what, "  File ..."))
    first, second = launcher.look()
    assert "ranks 0 and 2 have finished" in first
    assert "the thread 'a'" in first
    assert f"rank 1 (pid {os.getpid()}) has finished" in second
    assert launcher.look() == []
    assert ending.reported(tmp_path, 1)


def test_a_rank_that_cannot_say_it_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack = "Thread 0x1 (most recent call first):\n  File x"
    monkeypatch.setattr(processes, "ask_for_stack", lambda pid, file: stack)
    monkeypatch.setattr(processes, "state", lambda pid: processes.RUNNING)
    launcher = Launcher(tmp_path)
    launcher.over(1)
    assert [launcher.look() for _ in range(3)] == [[], [], []]  # it may only be slow
    monkeypatch.setattr(processes, "state", lambda pid: "sleeping")
    launcher.over(0)
    (said,) = launcher.look()
    assert said.startswith(f"{stack}\nrank 1 (pid ")
    assert ending.reported(tmp_path, 1)
    assert not ending.reported(tmp_path, 0)


SCRIPT = """
import threading
def upload():
    while True:
        threading.Event().wait(0.01)
threading.Thread(target=upload, name="uploader").start()
"""


def test_ranks_that_wait_for_threads_say_so_and_end_at_one_ctrl_c(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "lockstep", "run", "--workers", "2", "script.py"]
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        lines = iter(process.stderr.readline, "")
        said = next(line for line in lines if "do not end" in line or "does not end" in line)
        assert "the thread 'uploader' (runs upload, script.py:3; now at script.py:5 upload)" in said
        process.send_signal(signal.SIGINT)
        assert process.wait() == 130
        assert process.stderr.read().endswith("stopped by Ctrl-C; all ranks have ended\n")
    finally:
        end(process)


def page(folder: Path, rank: int, *, over: bool, opened: bool) -> None:
    written = status.Page(status.file_of(folder, rank))
    if opened:
        written.opened()
    if over:
        pages.enter(written, "end")


def test_one_rank_that_had_a_group_or_left_without_a_word_is_enough_for_silence(
    tmp_path: Path,
) -> None:
    page(tmp_path, 0, over=True, opened=False)
    page(tmp_path, 1, over=True, opened=False)
    page(tmp_path, 2, over=True, opened=True)
    page(tmp_path, 3, over=False, opened=False)
    assert "2 ranks never joined" in ending.warning_if_never_joined(tmp_path, [0, 1], 2)
    assert "4 ranks never joined" in ending.warning_if_never_joined(tmp_path, [0, 1], 4)
    assert ending.warning_if_never_joined(tmp_path, [0], 1) == ""
    assert ending.warning_if_never_joined(tmp_path, [0, 1, 2], 3) == ""
    assert ending.warning_if_never_joined(tmp_path, [0, 1, 3], 3) == ""
    assert ending.warning_if_never_joined(tmp_path, [0, 1, 9], 3) == ""


ALONE = "import torch; torch.distributed.is_available()"
OURS = "import lockstep\nwith lockstep.init(): pass"
OWN_STORE = """
import os
import torch.distributed as dist
store = dist.FileStore("store", 2)
dist.init_process_group("gloo", store=store, rank=int(os.environ["RANK"]), world_size=2)
dist.barrier()
dist.destroy_process_group()
"""


def test_a_program_that_never_becomes_distributed(run: Run) -> None:
    for text, workers, warned in (
        (ALONE, 2, True),
        (ALONE, 1, False),
        (OURS, 2, False),
        (OWN_STORE, 2, False),
    ):
        code, _, err = run(text, workers)
        assert code == 0
        assert ("never joined" in err) == warned
        assert len(err.splitlines()) == int(warned)
