"""Stop a run that a scheduler or Ctrl-C asks to stop. Ranks that heed signals stop after a step,
with a checkpoint; other ranks stop at once.

    SIGTERM, SIGUSR1 -> a rank notes it and tells its launcher, which tells the other ranks
                     -> all stop after the same step, save, and exit with 75

A rank's handler only notes the signal, since it may arrive at any point. Without Lockstep's
launcher the other ranks learn of it in the facts of their next step. The launcher's side:

first signal    ranks that heed signals are told, all of them, even if only one got the signal; they
                agree on a step, save, and exit
                ranks that do not (another kind of script, or a rank still starting up) get the
                signal: SIGUSR1 as SIGUSR1, all others as SIGTERM. Their own handlers have a grace
                period, then they are killed
                ranks whose program is over, and which have reported what they wait for, are not
                asked and not waited for
second signal   all ranks are ended at once
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
from lockstep.launcher.processes import Pids
from lockstep.runtime import preemption as flag

HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
mark = failures.rank_file
HEEDS, ASKED = "heeds", "asked"
"""Kinds of files that a rank leaves for the launcher. "heeds": it stops by itself when asked.
"asked": it has been asked.
"""


def listen() -> Callable[[], None]:
    """Note signals from now on instead of dying from them. Returns a function that undoes this.
    Handlers belong to the main thread: in another thread this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        return lambda: None
    before = {number: signal.signal(number, _note_signal) for number in SIGNALS}
    _leave_mark(HEEDS)

    def restore() -> None:
        flag.asked = False
        _restore(before)

    return restore


def _note_signal(number: int, frame: FrameType | None) -> None:
    if not flag.asked:
        flag.asked = True
        _leave_mark(ASKED)


def _leave_mark(kind: str) -> None:
    directory = os.environ.get(failures.DIRECTORY)
    if directory is not None:
        with suppress(OSError):
            mark(Path(directory), int(os.environ.get("RANK", "0")), kind).touch()


def _restore(handlers: Mapping[signal.Signals, Any]) -> None:
    for number, handler in handlers.items():
        signal.signal(number, handler)


class Stop:
    """Whether this process has been asked to stop, by which signal, and how far it is. The handler
    only notes the signal: code that waits must call `now`.
    """

    def __init__(self, *, speaks: bool = True, kill: Callable[[int, int], None] = os.kill) -> None:
        self.number: int | None = None
        self.times = 0
        """How often it was asked to stop; 2 stands for more, too."""
        self._speaks = speaks
        self._kill = kill
        self._forwarded = False  # whether ranks that heed signals know of it

    def note(self, number: int, frame: FrameType | None) -> None:
        self.number = self.number or number
        self.times = min(self.times + 1, 2)

    def now(self, directory: Path, pids: Pids) -> bool:
        """Whether the ranks (`pids`) are to be ended at once. If they can stop by themselves, it
        tells them to. Called many times.
        """
        signalled = self.number is not None
        if not signalled and not any(mark(directory, rank, ASKED).exists() for rank in pids):
            return False
        if self.at_once:
            return True
        working = [rank for rank in pids if not ending.reported(directory, rank)]
        if not working or not all(mark(directory, rank, HEEDS).exists() for rank in working):
            # if one rank was asked alone, before the others heed signals, it waits for them
            return signalled or self._forwarded
        if not self._forwarded:
            self._forwarded = True
            if signalled:
                self.announce("stopping after this step")
            for rank in working:
                with suppress(ProcessLookupError):
                    self._kill(pids[rank], signal.SIGUSR1)
        return False

    @property
    def at_once(self) -> bool:
        """Whether nobody is to be waited for: after a second signal, and after SIGQUIT."""
        return self.times > 1 or self.number == signal.SIGQUIT

    def announce(self, effect: str) -> None:
        """Print what the signal leads to, unless this process is silent."""
        if self._speaks and self.number is not None:
            print_line(f"{self.name}: {effect}; repeat it to stop at once")

    @property
    def name(self) -> str:
        """The name of the signal."""
        assert self.number is not None
        return "Ctrl-C" if self.number == signal.SIGINT else signal_name(self.number)

    def exit_code(self, *, saved: bool) -> int:
        """Return the exit code of a run that was stopped. It is 75 for a scheduler's signal if a
        training can resume from its checkpoint, else 128 + n.
        """
        assert self.number is not None
        return ExitCode.PREEMPTED if saved and self.number in SIGNALS else 128 + self.number


def print_line(text: str) -> None:
    """Print to stderr while ranks run. On a terminal, overwrite the current row: a rank's bar or
    what Ctrl-C has left, which have no end of line.
    """
    clear = ""
    if sys.stderr.isatty():
        clear = "\n" if os.environ.get("TERM", "dumb") == "dumb" else "\r\x1b[K"
    print(f"{clear}{text}", file=sys.stderr, flush=True)


@contextmanager
def note_signals(*, speaks: bool = True) -> Iterator[Stop]:
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
        _restore(before)
