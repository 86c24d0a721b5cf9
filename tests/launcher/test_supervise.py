"""The launcher as a process: exit codes, who is blamed, what is printed, and that nobody is left
over.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal

import psutil
import pytest

from lockstep.config.launching import Launch
from lockstep.launcher import ending, failures
from lockstep.launcher.engine import LocalRanks
from lockstep.launcher.stop import Stop
from lockstep.launcher.supervise import (
    Outcome,
    Share,
    Watch,
    Workers,
    restarts_of,
    run_with_restarts,
)
from lockstep.runtime import processes, status
from lockstep.runtime.failure_record import Failure, Kind, rank_file
from lockstep.runtime.preemption import HEEDS, RESUMED, SAVED, asked_file
from tests.ending import alive, end, kill, wait_gone
from tests.launcher.conftest import Run
from tests.refused import refused

# Ranks that need no torch start fast; those that use it say so.
# in one piece: an unbuffered print writes a line in several, and others come between them
_SAY = "os.write(1, f'pid {os.getpid()}\\n'.encode())"
_JOIN = "import lockstep, os, signal, sys, time, torch\nworld = lockstep.init()\n"
_SPEAK = (
    "import os, sys; print('out', os.environ['RANK']); print('err', os.environ['RANK'],"
    " file=sys.stderr)"
)
_REDUCE = "world.group.all_reduce(torch.ones(3)).wait()\n"

_ALONE = f"{ending.never_joined(2)}\n"

_LAUNCHER = """
import sys
from pathlib import Path
from lockstep.config.launching import Launch
from lockstep.launcher.rank import Target
from lockstep.launcher.supervise import supervise
options = eval(sys.argv[2])
if __name__ == "__main__":
    launch = Launch(grace=0.5)
    target = Target(script=sys.argv[1], args=sys.argv[3:])
    sys.exit(supervise(target, launch=launch, **options).exit_code)
"""


class Launched:
    """A launcher in its own process, running `text` on ranks."""

    def __init__(self, folder: Path, text: str, **options: object) -> None:
        (folder / "script.py").write_text(textwrap.dedent(text))
        self.temporary = folder / "temporary"
        self.temporary.mkdir()
        command = [sys.executable, "-c", _LAUNCHER, "script.py", repr({"workers": 2, **options})]
        env = {**os.environ, "TMPDIR": str(self.temporary)}
        self.process = subprocess.Popen(
            command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def pids(self, count: int) -> list[psutil.Process]:
        """Processes that said "pid N" on stdout."""
        assert self.process.stdout is not None
        lines = [self.process.stdout.readline() for _ in range(count)]
        assert all(line.startswith("pid ") for line in lines), (
            lines,
            self.end() if "" in lines else "",
        )
        return [psutil.Process(int(line.split()[1])) for line in lines]

    def end(self) -> tuple[int, str, str]:
        """Exit code, stdout, stderr; checks that no file of the run is left."""
        out, err = self.process.communicate()
        assert [file for file in self.temporary.rglob("*") if "run-" in file.name] == []
        return self.process.returncode, out, err


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Launched]]:
    started: list[Launched] = []

    def start(text: str, **options: object) -> Launched:
        started.append(Launched(tmp_path, text, **options))
        return started[-1]

    yield start
    for launched in started:  # only a failed test leaves one running
        end(launched.process)


def test_a_good_end_prints_only_that_the_ranks_never_joined_and_puts_handlers_back(
    run: Run,
) -> None:
    handled = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    before = [signal.getsignal(number) for number in handled]
    code, out, err = run(
        "import os; print(os.environ['RANK'], os.environ['WORLD_SIZE'], os.environ['X'])",
        environment={"X": "y"},
    )
    assert (code, sorted(out.splitlines()), err) == (0, ["0 2 y", "1 2 y"], _ALONE)
    assert [signal.getsignal(number) for number in handled] == before


def test_the_rank_that_raised_is_blamed_and_a_crash_shows_the_python_stack(run: Run) -> None:
    code, out, err = run(
        _JOIN + "if world.rank == 1: raise ValueError('boom')\n" + _REDUCE, workers=3
    )
    assert (code, out) == (1, "")
    lines = err.splitlines()
    assert lines[:2] == [
        "Traceback (most recent call last):",
        '  File "script.py", line 3, in <module>',
    ]
    assert lines[-2] == "ValueError: boom"
    assert lines[-1].startswith("rank 1 (pid ")
    assert lines[-1].endswith(" failed: ValueError: boom")
    assert "Connection" not in err
    assert err.count("Traceback") == 1

    code, _, err = run("import ctypes\ndef crash(): ctypes.string_at(0)\ncrash()", workers=1)
    assert code == 139
    assert 'File "script.py", line 2 in crash' in err
    assert "lockstep/launcher" not in err
    assert err.splitlines()[-1].endswith("was killed by signal 11 (SIGSEGV)")


def test_a_rank_that_finished_early_is_noted(run: Run) -> None:
    code, _, err = run(_JOIN + _REDUCE + "if world.rank == 1: os._exit(0)\n" + _REDUCE)
    note = "rank 1 had finished before that: do all ranks take the same number of steps?"
    assert (code, err.splitlines()[-1]) == (1, note)


def test_exit_codes_pass_through_with_one_line(run: Run) -> None:
    killed = _JOIN + "if world.rank == 1: os.kill(os.getpid(), signal.SIGKILL)\n" + _REDUCE
    interrupted = "import os, signal; os.kill(os.getpid(), signal.SIGINT)"
    for text, code, error in (
        ("import sys; sys.exit(3)", 3, "exited with code 3 (script.py:1)"),
        ("import os; os._exit(7)", 7, "exited with code 7"),
        (killed, 137, "was killed by signal 9 (SIGKILL)"),
        ("import sys; sys.exit('sorry')", 1, "exited with code 1 (script.py:1): sorry"),
        ("import lockstep; lockstep.init(backend='x')", 2, "error: backend='x' is unknown"),
        (interrupted, 130, "exited with code 130: KeyboardInterrupt"),
    ):
        ended, _, err = run(text)
        assert (ended, err.count("\n")) == (code, 1), (text, err)
        assert error in err


def test_a_signal_before_the_ranks_are_there_is_not_lost(launch: Callable[..., Launched]) -> None:
    launched = launch("import signal; signal.pause()")
    home = launched.temporary / f"lockstep-{os.getuid()}"
    while not list(home.glob("run-*")):
        # made while signals are noted already, and before torch is imported
        assert launched.process.poll() is None
        time.sleep(0.005)
    launched.process.send_signal(signal.SIGINT)
    assert launched.end()[0] == 130


def test_ranks_that_ignore_sigterm_and_their_children_are_ended_too(
    launch: Callable[..., Launched],
) -> None:
    text = f"""
    import os, signal, subprocess, sys
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen([sys.executable, "script.py", "child"]) if len(sys.argv) == 1 else None
    {_SAY}
    signal.pause()
    """
    launched = launch(text)
    processes = launched.pids(4)
    launched.process.terminate()
    line = "stopped by signal 15 (SIGTERM); all ranks have ended\n"
    assert launched.end() == (143, "", line)
    wait_gone(processes)


def test_what_a_rank_leaves_running_is_ended_and_said_but_not_what_has_a_session_of_its_own(
    run: Run, tmp_path: Path
) -> None:
    text = """
    import os, subprocess, sys
    own = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], stdout=subprocess.DEVNULL, start_new_session=True)
    left = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], stdout=subprocess.DEVNULL)
    print(own.pid, left.pid)
    """
    code, out, err = run(text, workers=1)
    own, left = (int(pid) for pid in out.split())
    try:
        assert code == 0
        assert re.match(rf"rank 0 has left .* \(pid {left}\) running: ", err)
        assert str(own) not in err
        wait_gone([left])
        assert alive(own)
    finally:
        kill([psutil.Process(own)])


def test_ranks_and_loader_workers_die_with_the_killed_launcher(
    launch: Callable[..., Launched],
) -> None:
    text = _JOIN + textwrap.dedent(f"""
        class Numbers(torch.utils.data.Dataset):
            def __len__(self): return 64
            def __getitem__(self, index):
                if index == 0 or index == 63: {_SAY}
                return torch.tensor(index)
        if __name__ == "__main__":
            loader = lockstep.Loader(Numbers(), global_batch=64, micro_batch=8, shuffle=False, num_workers=1)
            for epoch in loader.epochs(1):
                for window in epoch:
                    for batch in window: pass
                    {_SAY}
                    signal.pause()
        """)
    launched = launch(text)
    processes = launched.pids(4)
    assert len({process.pid for process in processes}) == 4
    launched.process.kill()
    launched.process.communicate()
    wait_gone(processes)


def test_only_the_first_rank_is_heard_if_asked_and_logs_hold_each_ranks_output(
    run: Run, tmp_path: Path
) -> None:
    assert run(_SPEAK, console="first") == (0, "out 0\n", f"err 0\n{_ALONE}")
    assert run(_SPEAK, logs=tmp_path, console="first") == (0, "out 0\n", f"err 0\n{_ALONE}")
    logs = [(tmp_path / f"rank-{rank}.log").read_text() for rank in (0, 1)]
    assert logs == ["out 0\nerr 0\n", "out 1\nerr 1\n"]


def test_the_last_lines_of_a_rank_that_was_not_on_the_terminal_are_shown(run: Run) -> None:
    text = """
    import os, signal, sys
    print("said by", os.environ["RANK"])
    if os.environ["RANK"] == sys.argv[1]: raise ValueError("boom")
    signal.pause()
    """
    for rank, shown in enumerate(([], ["the last that rank 1 printed:", "said by 1"])):
        lines = run(text, 2, str(rank), console="first")[2].splitlines()
        assert lines[: len(shown) + 1] == [*shown, "Traceback (most recent call last):"]
        assert lines[-1].endswith(f"rank-{rank}.log) failed: ValueError: boom")


Ending = Literal["end", "grow", "kill", "loader", "raise", "stopped"]
NEWEST = "from the newest checkpoint"


def outcome(ending: Ending) -> Outcome:
    if ending in ("end", "grow"):
        return Outcome(0, grows=ending == "grow")
    if ending == "stopped":
        return Outcome(130)
    kinds: dict[Ending, Kind] = {"kill": "signal", "loader": "loader", "raise": "exception"}
    kind = kinds[ending]
    code = 1 if ending == "raise" else 137
    return Outcome(
        code, Failure(rank=0, kind=kind, message="", code=code, pid=1, host="", monotonic_ns=0)
    )


@pytest.mark.parametrize(
    ("workers", "restarts", "endings", "counts", "code"),
    [
        # a killed worker is done without until the next checkpoint
        ((1, 4), 3, ("kill", "grow", "end"), [4, 3, 4], 0),
        ((1, 4), 3, ("kill", "kill", "end"), [4, 3, 2], 0),
        ((2, 3), 3, ("kill", "kill", "kill", "end"), [3, 2, 2, 2], 0),
        ((1, 2), 3, ("loader", "end"), [2, 1], 0),
        ((2, 2), 1, ("kill", "end"), [2, 2], 0),
        # restarts are counted, and growing is none
        ((1, 2), 2, ("kill", "grow", "kill", "grow", "kill"), [2, 1, 2, 1, 2], 137),
        ((1, 4), 0, ("kill",), [4], 137),
        # what would come back, and what was meant, begin nothing
        ((1, 4), 3, ("raise",), [4], 1),
        ((1, 4), 3, ("stopped",), [4], 130),
        ((1, 4), 3, ("end",), [4], 0),
    ],
)
def test_restarts(
    workers: tuple[int, int],
    restarts: int,
    endings: tuple[Ending, ...],
    counts: list[int],
    code: int,
) -> None:
    """The workers of each generation, and the exit code, where the generations end like this."""
    started: list[int] = []
    script = iter(endings)

    def start(count: int) -> Outcome:
        started.append(count)
        return outcome(next(script))

    ended = run_with_restarts(start, Workers(*workers), Launch(max_restarts=restarts))
    assert list(script) == [], "it went on for as long as it should"
    assert (started, ended.exit_code) == (counts, code)


@pytest.mark.parametrize(
    ("saves", "lines"),
    [
        ((False, False, True, False), ["from the beginning", "hint", "from the beginning", NEWEST]),
        ((True, False, False, False), [NEWEST, NEWEST, NEWEST]),
    ],
)
def test_ranks_without_a_checkpoint_are_said_to_begin_again_and_that_once(
    capsys: pytest.CaptureFixture[str], saves: tuple[bool, ...], lines: list[str]
) -> None:
    """A checkpoint of an earlier start is still there."""
    script = iter(saves)

    def start(count: int) -> Outcome:
        return replace(outcome("kill"), saved=next(script))

    run_with_restarts(start, Workers(2, 2), Launch(max_restarts=3), hint="hint")
    assert [line.rpartition(", ")[2] for line in capsys.readouterr().err.splitlines()] == lines


@pytest.mark.parametrize("heeds", [True, False])
def test_ranks_are_asked_to_grow_only_if_they_have_saved_and_heed_signals(
    tmp_path: Path, heeds: bool
) -> None:
    reports: list[bool] = []
    ranks = LocalRanks(count=1, size=1, address="", port=0)
    share = Share(ranks=ranks, on_checkpoint=reports.append)
    watch = Watch(tmp_path, Stop(kill=lambda pid, number: None), Launch(), share, grows=True)
    if heeds:
        rank_file(tmp_path, 0, HEEDS).touch()
    for mark in (RESUMED, SAVED):
        assert watch.must_end({0: os.getpid()}) is None
        assert not asked_file(tmp_path).exists()
        rank_file(tmp_path, 0, mark).touch()
    assert watch.must_end({0: os.getpid()}) is None
    assert (asked_file(tmp_path).exists(), reports) == (heeds, [False, heeds])


def test_how_often_a_run_is_restarted() -> None:
    assert restarts_of(Launch(), None) == 0
    assert restarts_of(Launch(), Workers(2, 2)) == 0
    assert restarts_of(Launch(), Workers(1, 2)) == 3
    assert restarts_of(Launch(on_stall="restart"), None) == 3
    assert restarts_of(Launch(max_restarts=1), Workers(1, 2)) == 1
    assert restarts_of(Launch(max_restarts=0, on_stall="restart"), None) == 0


def test_workers_are_read() -> None:
    assert (Workers.read("4"), Workers.read("1:4")) == (Workers(4, 4), Workers(1, 4))
    for text in ("", "x", "1:", ":4", "4:1", "0", "0:2", "1:2:3", "-1"):
        with refused("wrong-value", value=text):
            Workers.read(text)


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
