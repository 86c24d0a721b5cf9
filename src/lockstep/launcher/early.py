"""What a command does before it has read its arguments to the end. Nothing heavy is imported here.

A scheduler's signals end it with the documented exit code, and the process that forks its ranks
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
    """Where this process has closed stdin, stdout or stderr, as a daemon does: what is opened
    next would take its number, and be a rank's.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # the lowest number that is free
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)


def open_closed_streams() -> None:
    """Those of this process, and what Python makes of them: it has found none."""
    open_streams()
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))  # noqa: SIM115 - as long as the process


def leave_when_asked() -> None:
    """From now on, and wherever nobody else handles them, SIGTERM and SIGUSR1 end this process with
    75: no rank runs, and the same command starts again.

    It unwinds as sys.exit does, so that a run directory that was just made is removed. A signal
    that is ignored stays so.
    """
    for number in (signal.SIGTERM, signal.SIGUSR1):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _leave)


_RUN_SCRIPTS = {"run", "doctor"}
_TRAIN = {"train", "tune", "verify", "bench", "plan", "evaluate", "predict"}
_WITHOUT_WARM_RANKS = {"-h", "--help", "--help-all", "--cold", "--debug", "--model", "--ray"}


def start_server(arguments: Sequence[str]) -> None:
    """Have the server that ranks are forked from import meanwhile what they need, where this
    command will start any.
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

    with suppress(UsageError):  # said by the command itself
        if started_by_others(os.environ) is None:
            server.server(server.FOR_TRAININGS if arguments[0] in _TRAIN else server.FOR_SCRIPTS)


def _leave(number: int, frame: FrameType | None) -> None:
    print(
        f"stopped by signal {number} ({signal.Signals(number).name}); no rank was running",
        file=sys.stderr,
        flush=True,
    )
    raise SystemExit(ExitCode.PREEMPTED)
