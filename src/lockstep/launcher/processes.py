"""Processes of this host seen from outside: what the system says of them, and where in Python they are, without their help."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

from lockstep.launcher.failures import is_users

STACK_SIGNAL = signal.SIGUSR2
_PATIENCE = 1.0  # seconds for a stack to be written
_FRAME = re.compile(r'\s+File "(.*)", line (\d+) in (.*)')


def stacks_into(file: Path) -> None:
    """Have this process write the stacks of its threads to `file` whenever it gets STACK_SIGNAL, also while native code holds the interpreter."""
    import faulthandler

    faulthandler.register(STACK_SIGNAL, written_to(file), all_threads=True, chain=False)


def written_to(file: Path) -> int:
    """Its descriptor, for a signal handler. It is open for as long as the process lives, and belongs to nobody who could close it."""
    return os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)


def ask_for_stack(pid: int, file: Path) -> str:
    """What `stacks_into(file)` of process `pid` writes now; "" where it does not, as one that is stopped or waits for a disk."""
    if not file.exists():
        return ""
    before = file.stat().st_size
    with suppress(ProcessLookupError):
        os.kill(pid, STACK_SIGNAL)
    deadline = time.monotonic() + _PATIENCE
    size = before
    while time.monotonic() < deadline:
        time.sleep(0.02)
        now = file.stat().st_size
        if now > before and now == size:
            break
        size = now
    with file.open(errors="replace") as stream:
        stream.seek(before)
        return stream.read()


def main_thread(dump: str) -> list[tuple[str, int, str]]:
    """(file, line, function) of the main thread's frames, innermost first. It is the last that is listed."""
    threads = re.split(r"^(?:Current thread|Thread) .*$", dump, flags=re.MULTILINE)
    return [(match[1], int(match[2]), match[3]) for line in threads[-1].splitlines() if (match := _FRAME.match(line))]


def users_line(frames: list[tuple[str, int, str]]) -> str:
    """ "dataset.py:88 read_shard": the innermost frame in the user's own code, else the innermost of all."""
    theirs = next((frame for frame in frames if is_users(frame[0])), None) or next(iter(frames), None)
    return "" if theirs is None else f"{os.path.basename(theirs[0])}:{theirs[1]} {theirs[2]}"


def state(pid: int) -> str:
    """ "R" runs, "S" sleeps, "T" is stopped, "D" waits for a disk, "Z" has ended; "" where the system does not say."""
    if sys.platform != "linux":
        return ""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


def group(leader: int) -> dict[int, str]:
    """The living processes of the process group of `leader`, which is not one of them any more: their names by pid. Linux only; {} elsewhere."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*") if sys.platform == "linux" else ():
        with suppress(OSError, ValueError):
            name, _, rest = (entry / "stat").read_text(errors="replace").partition("(")[2].rpartition(")")
            fields = rest.split()
            if int(fields[2]) == leader and fields[0] not in "ZX":
                found[int(entry.name)] = name
    return found


def children(pid: int) -> list[int]:
    """Processes that `pid` has started and that live."""
    found = []
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):
                found += [int(child) for child in (task / "children").read_text().split()]
    return found
