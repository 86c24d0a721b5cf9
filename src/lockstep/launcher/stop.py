"""Stop a run that a scheduler or Ctrl-C asks to stop. Ranks that heed signals stop after a step,
with a checkpoint; other ranks stop at once. runtime/preemption.py is the rank's side.

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
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from lockstep.errors import ExitCode
from lockstep.launcher import ending
from lockstep.launcher.failures import signal_name
from lockstep.runtime.failure_record import rank_file
from lockstep.runtime.preemption import HEEDS, SIGNALS, asked_file, restore_handlers
from lockstep.runtime.processes import Pids

HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)


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
        if not signalled and not asked_file(directory).exists():
            return False
        if self.at_once:
            return True
        working = [rank for rank in pids if not ending.reported(directory, rank)]
        if not working:
            return signalled or self._forwarded
        if not self._forwarded:
            if not all(rank_file(directory, rank, HEEDS).exists() for rank in working):
                # if one rank was asked alone, before the others heed signals, it waits for them
                return signalled
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
        restore_handlers(before)
