"""The run directory as the command asks for it: gone on with, insisted on, or begun anew beside what is there.

No torch at the top: the launcher claims the folder before any rank starts.
"""

from __future__ import annotations

import sys
from pathlib import Path

from lockstep.errors import ExitCode
from lockstep.settings import Settings
from lockstep.training.resolve import short_name
from lockstep.training.run_directory import RunDirectory, take_over


def claimed(settings: Settings, run: Path | None, *, resume: bool, fresh: bool) -> RunDirectory:
    """Claim the directory `run` (None: a new one), with its copies elsewhere set aside where it is to be `fresh`.

    Raises UsageError where it cannot be used, and SystemExit with 77, after a sentence on stderr, where `resume` finds nothing to go on from.
    """
    directory = RunDirectory.claim(run, short_name(settings.task), fresh=fresh)
    try:
        remote = None
        if settings.checkpoints is not None:
            from lockstep.checkpoints.remote import Remote  # imports torch

            remote = Remote(settings.checkpoints)
        if remote is not None and fresh:
            remote.set_aside()
        if resume:
            from lockstep.training.resume import why_not_resumable  # imports torch

            if why := why_not_resumable(directory, remote):
                print(why, flush=True, file=sys.stderr)
                raise SystemExit(ExitCode.NO_CHECKPOINT)
        take_over(directory, settings)
    except BaseException:
        directory.release()
        raise
    return directory
