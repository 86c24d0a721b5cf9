"""What a command does before it has parsed its arguments. Nothing heavy is imported here.

A scheduler's signals end the command with the documented exit code. The process that forks ranks
begins to import torch.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType

from lockstep.errors import ExitCode, UsageError


def open_streams() -> None:
    """Open /dev/null as stdin, stdout and stderr where they are closed, as in a daemon. Otherwise
    the next file that is opened would get such a number, and ranks would use it as a stream.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # os.open returns the lowest free number
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)


def open_closed_streams() -> None:
    """Open this process's closed streams, and set those of sys that Python has left as None."""
    open_streams()
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))  # noqa: SIM115 - stays open


def leave_when_asked() -> None:
    """Make SIGTERM and SIGUSR1 end this process with exit code 75, where no other handler replaces
    this one: no rank runs, and the same command can start again.

    It exits as sys.exit does, so that a new run directory is removed. An ignored signal stays
    ignored.
    """
    for number in (signal.SIGTERM, signal.SIGUSR1):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _leave)


_RUN_SCRIPTS = {"run", "doctor"}
_TRAIN = {"train", "verify", "bench", "plan", "evaluate", "predict"}
_WITHOUT_WARM_RANKS = {"-h", "--help", "--help-all", "--cold", "--debug", "--gradient-mb", "--ray"}


def start_server(arguments: Sequence[str]) -> None:
    """Start the fork server early, if this command will start ranks. It imports what they need
    while the command goes on.
    """
    given = {argument.partition("=")[0] for argument in arguments}
    if (
        len(arguments) < 2
        or arguments[0] not in _RUN_SCRIPTS | _TRAIN
        or _WITHOUT_WARM_RANKS.intersection(given)
    ):
        return
    from lockstep.launcher import server
    from lockstep.runtime.environment import started_by_others

    with suppress(UsageError):  # the command itself reports it
        if started_by_others(os.environ) is None:
            server.server(server.FOR_TRAININGS if arguments[0] in _TRAIN else server.FOR_SCRIPTS)


def _leave(number: int, frame: FrameType | None) -> None:
    print(
        f"stopped by signal {number} ({signal.Signals(number).name}); no rank was running",
        file=sys.stderr,
        flush=True,
    )
    raise SystemExit(ExitCode.PREEMPTED)
