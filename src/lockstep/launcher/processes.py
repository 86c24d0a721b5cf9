"""Processes of this host seen from outside: what the system says of them, and where in Python
they are, without their help.
"""

from __future__ import annotations

import linecache
import os
import re
import signal
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from traceback import FrameSummary, StackSummary

import psutil

from lockstep.launcher.failures import is_users

STACK_SIGNAL = signal.SIGUSR2
STOPPED: str = psutil.STATUS_STOPPED
DISK: str = psutil.STATUS_DISK_SLEEP
DEAD: str = psutil.STATUS_ZOMBIE
_PATIENCE = 1.0  # seconds for a stack to be written
_ASLEEP_IN = {
    "nanosleep": "sleep",
    "futex": "wait for another thread",
    "pipe": "read from a pipe",
    "wait4": "wait for a process",
    "do_wait": "wait for a process",
    "ep_poll": "wait for input",
    "poll": "wait for input",
    "select": "wait for input",
    "sk_": "read from a socket",
    "recv": "read from a socket",
    "wait_woken": "read from a socket",
    "accept": "accept a connection",
    "flock": "wait for a lock on a file",
}
"""What the names of the kernel's functions mean; the first that is part of one counts."""
_FRAME = re.compile(r'\s+File "(.*)", line (\d+) in (.*)')
_CONTROL_GROUPS = Path("/sys/fs/cgroup")


def name_this(name: str) -> None:
    """What `ps` and `top` call this process; those that it starts keep the name that it had."""
    file = Path("/proc/self/comm")
    with suppress(OSError):
        before = file.read_text()
        file.write_text(name)
        os.register_at_fork(after_in_child=lambda: _rename(file, before))


def _rename(file: Path, name: str) -> None:
    with suppress(OSError):
        file.write_text(name)


def stacks_into(file: Path) -> None:
    """Have this process write the stacks of its threads to `file` whenever it gets STACK_SIGNAL,
    also while native code holds the interpreter.
    """
    import faulthandler

    faulthandler.register(STACK_SIGNAL, written_to(file), all_threads=True, chain=False)


def written_to(file: Path) -> int:
    """Its descriptor, for a signal handler. It is open for as long as the process lives, and
    belongs to nobody who could close it.
    """
    return os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)


def ask_for_stack(pid: int, file: Path) -> str:
    """What `stacks_into(file)` of process `pid` writes now; "" where it does not, as one that is
    stopped or waits for a disk.
    """
    if not file.exists() or not _answers(pid):
        return ""
    before = size = file.stat().st_size
    with suppress(ProcessLookupError):
        os.kill(pid, STACK_SIGNAL)
    deadline = time.monotonic() + _PATIENCE
    while time.monotonic() < deadline:
        time.sleep(0.02)
        now = file.stat().st_size
        if now > before and now == size:
            break
        size = now
    return file.read_bytes()[before:].decode(errors="replace")


def _answers(pid: int) -> bool:
    """Whether it handles STACK_SIGNAL. It would end one that does not."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return not Path("/proc/self/status").exists()  # another system
    caught = next((line.split()[1] for line in lines if line.startswith("SigCgt")), "0")
    return bool(int(caught, 16) >> (STACK_SIGNAL - 1) & 1)


def main_thread(dump: str) -> list[FrameSummary]:
    """The main thread's frames, outermost first. It is the last that is listed."""
    linecache.checkcache()
    threads = re.split(r"^(?:Current thread|Thread) .*$", dump, flags=re.MULTILINE)
    found = [
        FrameSummary(match[1], int(match[2]), match[3])
        for line in threads[-1].splitlines()
        if (match := _FRAME.match(line))
    ]
    return found[::-1]


def shown(frames: Sequence[FrameSummary]) -> str:
    """As in a traceback, from the first frame of the user's own code on, if there is one."""
    first = next((place for place, frame in enumerate(frames) if is_users(frame.filename)), 0)
    return "".join(StackSummary.from_list(frames[first:]).format())


def users_line(frames: Sequence[FrameSummary]) -> str:
    """ "dataset.py:88 read_shard": the innermost frame in the user's own code, else the innermost
    of all.
    """
    inwards = frames[::-1]
    theirs = next((frame for frame in inwards if is_users(frame.filename)), None) or next(
        iter(inwards), None
    )
    return (
        ""
        if theirs is None
        else f"{os.path.basename(theirs.filename)}:{theirs.lineno} {theirs.name}"
    )


def state(pid: int) -> str:
    """As psutil calls it: STOPPED, DISK (waits for one), DEAD, also where it is gone, or
    something else.
    """
    try:
        return str(psutil.Process(pid).status())
    except psutil.NoSuchProcess:
        return DEAD
    except psutil.AccessDenied:
        return ""  # it is there, and another user's


def activity(pid: int) -> str:
    """What its main thread does, as far as the system says it: "in a system call (sleep)", or
    "running".
    """
    if state(pid) != psutil.STATUS_SLEEPING:
        return "running"
    place = ""
    with suppress(OSError):
        place = Path(f"/proc/{pid}/wchan").read_text(encoding="utf-8")
    what = next((words for part, words in _ASLEEP_IN.items() if part in place), place)
    return f"in a system call ({what})" if what not in ("", "0") else "in a system call"


def cpu_seconds(pid: int) -> float:
    """That it and the processes which it has started have used."""
    used = 0.0
    with suppress(psutil.Error):
        parent = psutil.Process(pid)
        for each in (parent, *parent.children(recursive=True)):
            with suppress(psutil.Error):
                used += sum(each.cpu_times()[:4])
    return used


def groups(leaders: Collection[int]) -> dict[int, dict[int, str]]:
    """The living processes of the process groups of these leaders: by leader, their names by
    pid. Groups without any are left out.
    """
    found: dict[int, dict[int, str]] = {}
    for process in psutil.process_iter():
        with suppress(OSError, psutil.Error):
            group = os.getpgid(process.pid)
            if group in leaders and process.status() not in (DEAD, psutil.STATUS_DEAD):
                found.setdefault(group, {})[process.pid] = process.name()
    return found


def children(pid: int) -> list[int]:
    """Processes that `pid` has started and that live."""
    with suppress(psutil.Error):
        return [child.pid for child in psutil.Process(pid).children()]
    return []


def oom_kills(of: Path = Path("/proc/self/cgroup"), groups: Path = _CONTROL_GROUPS) -> int:
    """Processes that were killed for want of memory in this process's control group since it
    exists; 0 where the system does not count.
    """
    try:
        path = (
            next(line for line in of.read_text().splitlines() if line.startswith("0::"))
            .removeprefix("0::")
            .strip("/")
        )
        events = (groups / path / "memory.events").read_text()
    except (OSError, StopIteration):
        return 0
    found = re.search(r"^oom_kill (\d+)$", events, re.MULTILINE)
    return int(found[1]) if found else 0
