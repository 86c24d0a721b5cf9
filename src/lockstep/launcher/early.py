"""A scheduler's signals before the launcher has anything to stop: the command leaves at once with the documented exit code. Nothing heavy is imported."""

from __future__ import annotations

import signal
import sys
from types import FrameType

from lockstep.errors import ExitCode


def leave_when_asked() -> None:
    """From now on, and wherever nobody else handles them, SIGTERM and SIGUSR1 end this process with 75: no rank runs, and the same command starts again.

    It unwinds as sys.exit does, so that a run directory that was just made is removed. A signal that is ignored stays so.
    """
    for number in (signal.SIGTERM, signal.SIGUSR1):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _leave)


def _leave(number: int, frame: FrameType | None) -> None:
    print(f"stopped by signal {number} ({signal.Signals(number).name}); no rank was running", file=sys.stderr, flush=True)
    raise SystemExit(ExitCode.PREEMPTED)
