"""Asked to stop, by a scheduler or with Ctrl-C: ranks stop after a step, with a checkpoint, where they
have said that they do that, and at once elsewhere.

    SIGTERM, SIGUSR1 -> noted by a rank, and told to its launcher, which tells the other ranks
                     -> all stop after the same step, save, and leave with 75

A rank's handler only notes, since a signal may meet it anywhere. Without a launcher of ours the other
ranks hear of it in the facts of their next step. The launcher's side:

first signal    ranks that heed are told, all of them, also where only one of them was; they agree
                on a step, save, and leave
                ranks that do not (a script of another kind, one that is still starting) are ended
                ranks whose program is over, and of which it has been said what they wait for, are
                not asked and not waited for
second signal   all are ended now
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from lockstep.errors import ExitCode
from lockstep.launcher import ending, failures
from lockstep.launcher.failures import signal_name

HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
HEEDS, ASKED, SPARE = "heeds", "asked", "spare"
"""Files that a rank leaves for the launcher: it will stop by itself when asked; it has been
asked; the others can do without it if it is killed.
"""

_asked = False


def listen() -> Callable[[], None]:
    """Heed signals from now on, in place of dying of them; gives what ends that. Handlers belong
    to the main thread: from another nothing is done.
    """
    if threading.current_thread() is not threading.main_thread():
        return lambda: None
    before: dict[signal.Signals, Any] = {number: signal.signal(number, _note) for number in SIGNALS}
    _tell(HEEDS)

    def restore() -> None:
        global _asked
        _asked = False
        for number, handler in before.items():
            signal.signal(number, handler)

    return restore


def to_stop() -> bool:
    """Whether this process was asked to stop."""
    return _asked


def spare(yes: bool) -> None:
    """Tell the launcher whether the other ranks go on if this one is killed now."""
    directory = os.environ.get(failures.DIRECTORY)
    if directory is None:
        return
    file = mark(Path(directory), int(os.environ.get("RANK", "0")), SPARE)
    with suppress(OSError):
        file.touch() if yes else file.unlink(missing_ok=True)


def mark(directory: Path, rank: int, what: str) -> Path:
    """The file by which a rank tells its launcher so."""
    return directory / f"rank-{rank}.{what}"


def _note(number: int, frame: FrameType | None) -> None:
    global _asked
    if not _asked:
        _asked = True
        _tell(ASKED)


def _tell(what: str) -> None:
    directory = os.environ.get(failures.DIRECTORY)
    if directory is not None:
        with suppress(OSError):
            mark(Path(directory), int(os.environ.get("RANK", "0")), what).touch()


class Stop:
    """Has this process been asked to stop, by which signal, and how far is it? The handler only
    notes: whoever waits asks `now`.
    """

    def __init__(self, *, speaks: bool = True, kill: Callable[[int, int], None] = os.kill) -> None:
        self.number: int | None = None
        self._speaks, self._kill = speaks, kill
        self._again = False
        self._told = False

    def note(self, number: int, frame: FrameType | None) -> None:
        if self.number is None:
            self.number = number
        else:
            self._again = True

    def now(self, directory: Path, pids: Mapping[int, int]) -> bool:
        """Whether the ranks (`pids`, by rank) are to be ended at once. Tells them, where they
        will stop by themselves. Asked many times.
        """
        asked = self.number is not None
        if not asked and not any(mark(directory, rank, ASKED).exists() for rank in pids):
            return False
        if self._again or self.number == signal.SIGQUIT:
            return True
        pids = {rank: pid for rank, pid in pids.items() if not ending.waits(directory, rank)}
        if not pids or not all(mark(directory, rank, HEEDS).exists() for rank in pids):
            # a rank that was asked alone, before the others heed, waits for them
            return asked or self._told
        if not self._told:
            self._told = True
            if asked and self._speaks:
                say(f"{self.name}: stopping after this step; repeat it to stop at once")
            for pid in pids.values():
                with suppress(ProcessLookupError):
                    self._kill(pid, signal.SIGUSR1)
        return False

    @property
    def times(self) -> int:
        """How often it was asked, of which two count."""
        return 0 if self.number is None else 1 + self._again

    @property
    def name(self) -> str:
        """Of the signal."""
        assert self.number is not None
        return "Ctrl-C" if self.number == signal.SIGINT else signal_name(self.number)

    def exit_code(self, *, saved: bool) -> int:
        """Of a run that was stopped: 75 for a scheduler's signals where a training can go on
        from its checkpoint, else 128 + n.
        """
        assert self.number is not None
        return ExitCode.PREEMPTED if saved and self.number in SIGNALS else 128 + self.number


def say(text: str) -> None:
    """On stderr while ranks run. On a terminal it takes the place of a rank's bar, or of what
    Ctrl-C has left, which have no end of line.
    """
    print(f"{cleared_row()}{text}", file=sys.stderr, flush=True)


def cleared_row() -> str:
    """What clears the row in which the cursor is; "" where stderr is no terminal."""
    if not sys.stderr.isatty():
        return ""
    return "\n" if os.environ.get("TERM", "dumb") == "dumb" else "\r\x1b[K"


@contextmanager
def noted(*, speaks: bool = True) -> Iterator[Stop]:
    """Note signals instead of dying from them, except those that were ignored before (nohup,
    background jobs).
    """
    stop = Stop(speaks=speaks)
    before = {number: signal.getsignal(number) for number in HANDLED}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, stop.note)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
