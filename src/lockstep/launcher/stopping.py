"""A launcher's side of being asked to stop: at once, or after a step, with a checkpoint, where the
ranks have said that they do that.

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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from lockstep.errors import ExitCode
from lockstep.launcher import ending
from lockstep.launcher.asked import ASKED, HEEDS, mark
from lockstep.launcher.failures import signal_name

HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
_PREEMPTION = (signal.SIGTERM, signal.SIGUSR1)


class Stop:
    """Has this process been asked to stop, by which signal, and how far is it? The handler only
    notes: whoever waits asks `now`.
    """

    def __init__(self, *, speaks: bool = True) -> None:
        self.number: int | None = None
        self._speaks = speaks
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
                say(f"{self.name}: stopping after this step; once more to stop now")
            for pid in pids.values():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGUSR1)
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
        return ExitCode.PREEMPTED if saved and self.number in _PREEMPTION else 128 + self.number


def say(text: str) -> None:
    """On stderr while ranks run. A terminal may show a rank's bar, or what Ctrl-C has left,
    which has no end of line.
    """
    print(f"\n{text}" if sys.stderr.isatty() else text, file=sys.stderr, flush=True)


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
