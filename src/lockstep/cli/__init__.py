"""The `lockstep` command, and what it does before it has parsed its arguments.

A scheduler's signals end the command with the documented exit code. The process that forks ranks
begins to import torch. Nothing heavy is imported here.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType

from lockstep.errors import ExitCode, UsageError
from lockstep.runtime.streams import escape_what_is_not_printable, open_closed_streams

_WITHOUT_FORKED_RANKS = {"-h", "--help", "--help-all", "--cold", "--debug", "--ray"}


def main() -> None:
    """Run the command. `train` handles a scheduler's signals from here on, because the imports
    alone take seconds.
    """
    try:
        open_closed_streams()
        escape_what_is_not_printable()
        if sys.argv[1:2] == ["train"]:
            _exit_on_signals()
        _start_fork_server(sys.argv[1:])
        from lockstep.cli import app

        app.main()
    except KeyboardInterrupt:
        sys.exit(130)
    except RuntimeError as error:
        # Python 3.11 wraps what a signal's handler raises while a class is being made
        if isinstance(error.__cause__, SystemExit):
            raise error.__cause__ from None
        raise


def _exit_on_signals() -> None:
    """Make SIGTERM and SIGUSR1 end this process with exit code 75, where no other handler replaces
    this one: no rank runs, and the same command can start again.

    It exits as sys.exit does, so that a new run directory is removed. An ignored signal stays
    ignored.
    """
    for number in (signal.SIGTERM, signal.SIGUSR1):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _exit_as_preempted)


def _exit_as_preempted(number: int, frame: FrameType | None) -> None:
    print(
        f"stopped by signal {number} ({signal.Signals(number).name}); no rank was running",
        file=sys.stderr,
        flush=True,
    )
    raise SystemExit(ExitCode.PREEMPTED)


def _start_fork_server(arguments: Sequence[str]) -> None:
    """Start the fork server for `train` and `run`. It imports what ranks need while the command
    goes on.
    """
    options = {argument.partition("=")[0] for argument in arguments}
    if arguments[:1] not in (["train"], ["run"]) or _WITHOUT_FORKED_RANKS & options:
        return
    from lockstep.launcher.start import FOR_SCRIPTS, FOR_TRAININGS, fork_server
    from lockstep.runtime.environment import started_by_others

    with suppress(UsageError):  # the command itself reports it
        if started_by_others(os.environ) is None:
            fork_server(FOR_TRAININGS if arguments[0] == "train" else FOR_SCRIPTS)
