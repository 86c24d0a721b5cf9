"""Processes of this host seen from outside: what the system says of them, and where in Python they
are, even if they hang.
"""

from __future__ import annotations

import linecache
import os
import re
import signal
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from traceback import FrameSummary, StackSummary

import psutil

from lockstep.runtime.failure_record import is_users

Pids = Mapping[int, int]
"""The pids of ranks, by rank."""

STACK_SIGNAL = signal.SIGUSR2
RUNNING: str = psutil.STATUS_RUNNING
STOPPED: str = psutil.STATUS_STOPPED
DISK: str = psutil.STATUS_DISK_SLEEP
DEAD: str = psutil.STATUS_ZOMBIE
_PATIENCE = 5.0  # seconds to wait for a stack to be written
# seconds without growth after which a stack is complete: a busy host interrupts its writer
_WRITTEN = 0.1
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
"""What the names of the kernel's functions mean. The first key that is part of a name counts."""
_FRAME = re.compile(r'^\s+File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
_CONTROL_GROUPS = Path("/sys/fs/cgroup")


def name_this(name: str) -> None:
    """Set the name that `ps` and `top` show for this process. Processes that it forks keep the old
    name.
    """
    file = Path("/proc/self/comm")
    with suppress(OSError):
        before = file.read_text()
        file.write_text(name)

        def restore() -> None:
            with suppress(OSError):
                file.write_text(before)

        os.register_at_fork(after_in_child=restore)


def queued_seconds(pid: int) -> float:
    """Return how long a process's main thread could have run so far but had no core, because others
    had them all. 0 if the system does not say.
    """
    try:
        _, nanoseconds, _ = Path(f"/proc/{pid}/schedstat").read_text(encoding="ascii").split()
        return int(nanoseconds) / 1e9
    except (OSError, ValueError):
        return 0.0


def stacks_into(file: Path) -> None:
    """Make this process write the stacks of its threads to `file` whenever it gets STACK_SIGNAL,
    even while native code holds the interpreter.
    """
    import faulthandler

    faulthandler.register(STACK_SIGNAL, written_to(file), all_threads=True, chain=False)


def stack_of(directory: Path, rank: int, worker: int | None = None) -> Path:
    """Return the file to which a rank, or one of its loader workers, writes its stack if asked."""
    return directory / f"rank-{rank}{'' if worker is None else f'.worker-{worker}'}.now"


def written_to(file: Path) -> int:
    """Return a descriptor of `file` for a signal handler. It stays open as long as the process
    lives, because no object owns it that could close it.
    """
    return os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)


def ask_for_stack(pid: int, file: Path) -> str:
    """Return what `stacks_into(file)` of process `pid` writes now. "" if it does not write, for
    example because it is stopped or waits for a disk.
    """
    if not file.exists() or not _answers(pid):
        return ""
    before = file.stat().st_size
    size = before
    with suppress(ProcessLookupError):
        os.kill(pid, STACK_SIGNAL)
    deadline = time.monotonic() + _PATIENCE
    while time.monotonic() < deadline:
        time.sleep(_WRITTEN)
        now = file.stat().st_size
        if now > before and now == size:
            break
        size = now
    return file.read_bytes()[before:].decode(errors="replace")


def _answers(pid: int) -> bool:
    """Whether process `pid` handles STACK_SIGNAL. Without a handler, the signal would end it."""
    try:
        text = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except OSError:
        return not Path("/proc/self/status").exists()  # not Linux
    # the caught signals: bit n - 1 is for signal n
    mask = re.search(r"^SigCgt:\s*(\w+)$", text, re.MULTILINE)
    return mask is not None and bool(int(mask[1], 16) >> (STACK_SIGNAL - 1) & 1)


def main_thread(dump: str) -> list[FrameSummary]:
    """Return the main thread's frames, outermost first. `dump` lists the main thread last."""
    linecache.checkcache()
    threads = re.split(r"^(?:Current thread|Thread) .*$", dump, flags=re.MULTILINE)
    frames = _FRAME.findall(threads[-1])
    return [FrameSummary(file, int(line), name) for file, line, name in reversed(frames)]


def format_stack(frames: Sequence[FrameSummary]) -> str:
    """Format the frames as in a traceback, from the first frame of the user's code on, if there is
    one.
    """
    for index, frame in enumerate(frames):
        if is_users(frame.filename):
            frames = frames[index:]
            break
    return "".join(StackSummary.from_list(list(frames)).format())


def users_line(frames: Sequence[FrameSummary]) -> str:
    """Return "dataset.py:88 read_shard": the innermost frame in the user's own code, else the
    innermost frame of all.
    """
    if not frames:
        return ""
    users = [frame for frame in frames if is_users(frame.filename)]
    frame = (users or frames)[-1]
    return f"{os.path.basename(frame.filename)}:{frame.lineno} {frame.name}"


def state(pid: int) -> str:
    """Return psutil's name of the state: STOPPED, DISK (waits for a disk), DEAD (also if the
    process is gone), or another.
    """
    try:
        return str(psutil.Process(pid).status())
    except psutil.NoSuchProcess:
        return DEAD
    except psutil.AccessDenied:
        return ""  # the process exists and belongs to another user


def activity(pid: int) -> str:
    """Return what the main thread does, as far as the system says it: "in a system call (sleep)",
    or "running".
    """
    if state(pid) != psutil.STATUS_SLEEPING:
        return "running"
    function = "0"
    with suppress(OSError):
        function = Path(f"/proc/{pid}/wchan").read_text(encoding="utf-8")
    if function in ("", "0"):
        return "in a system call"
    meanings = [meaning for part, meaning in _ASLEEP_IN.items() if part in function]
    return f"in a system call ({meanings[0] if meanings else function})"


def cpu_seconds(pids: Collection[int]) -> dict[int, float]:
    """Return the processor seconds that each of these processes and its living descendants have
    used. To find the descendants, all processes of the host are read, once.
    """
    parents: dict[int, int] = {}
    used: dict[int, float] = {}
    for process in psutil.process_iter():
        with suppress(psutil.Error), process.oneshot():
            parents[process.pid] = process.ppid()
            used[process.pid] = sum(process.cpu_times()[:4])
    totals = dict.fromkeys(pids, 0.0)
    for pid, seconds in used.items():
        ancestor = pid
        while ancestor and ancestor not in totals:
            ancestor = parents.get(ancestor, 0)
        if ancestor:
            totals[ancestor] += seconds
    return totals


def groups(leaders: Collection[int]) -> dict[int, dict[int, str]]:
    """Return the living processes of the leaders' process groups: by leader, their names by pid.
    Empty groups are left out.
    """
    members: dict[int, dict[int, str]] = {}
    for process in psutil.process_iter():
        with suppress(OSError, psutil.Error):
            group = os.getpgid(process.pid)
            if group in leaders and process.status() not in (DEAD, psutil.STATUS_DEAD):
                members.setdefault(group, {})[process.pid] = process.name()
    return members


def children(pid: int) -> list[int]:
    """Return the living processes that `pid` has started."""
    with suppress(psutil.Error):
        return [child.pid for child in psutil.Process(pid).children()]
    return []


def oom_kills(of: Path = Path("/proc/self/cgroup"), groups: Path = _CONTROL_GROUPS) -> int:
    """Return how many processes of this process's control group were killed for lack of memory; 0
    if the system does not count.
    """
    with suppress(OSError):
        group = re.search(r"^0::/*(.*)$", of.read_text(), re.MULTILINE)
        if group is not None:
            events = (groups / group[1] / "memory.events").read_text()
            count = re.search(r"^oom_kill (\d+)$", events, re.MULTILINE)
            return 0 if count is None else int(count[1])
    return 0
