"""The run directory as the command asks for it: gone on with, insisted on, or begun anew beside what is there.

No torch at the top: the launcher claims the folder before any rank starts.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.checkpoints.folders import written
from lockstep.checkpoints.manifest import check
from lockstep.errors import DamagedCheckpoint, ExitCode, UsageError
from lockstep.settings import Settings
from lockstep.training.resolve import short_name
from lockstep.training.run_directory import RESULT, RunDirectory, take_over

if TYPE_CHECKING:
    from lockstep.checkpoints.remote import Remote


def finished_before(settings: Settings, run: Path | None, *, resume: bool, fresh: bool) -> bool:
    """Whether `run` holds the result of this training, so that nothing is to be trained: the same command after its end, or `resume`."""
    if run is None or fresh or not (run / RESULT).exists():
        return False
    return resume or not settings.differences(Settings.read(run))


def claimed(settings: Settings, run: Path | None, *, resume: bool, fresh: bool) -> RunDirectory:
    """Claim the directory `run` (None: a new one), with its copies elsewhere set aside where it is to be `fresh`.

    Raises UsageError where it cannot be used, and SystemExit with 77, after a sentence on stderr, where `resume` finds nothing to go on from.
    """
    directory = RunDirectory.claim(run, short_name(settings.task), fresh=fresh)
    try:
        remote = None
        if settings.checkpoints is not None:
            _check_installed(settings.checkpoints)
            from lockstep.checkpoints.remote import Remote  # imports torch

            remote = Remote(settings.checkpoints)
        if remote is not None and fresh:
            remote.set_aside()
        if resume and (why := _why_not_resumable(directory, remote)):
            print(why, flush=True, file=sys.stderr)
            raise SystemExit(ExitCode.NO_CHECKPOINT)
        take_over(directory, settings)
    except BaseException:
        directory.release()
        raise
    return directory


def _check_installed(url: str) -> None:
    """Raises UsageError where no package that reads and writes such a URL is installed."""
    import fsspec

    protocol, separator, _ = url.partition("://")
    try:
        fsspec.get_filesystem_class(protocol if separator else "file")
    except (ImportError, ValueError) as error:
        raise UsageError(f"checkpoints at {url}: {error}") from None


def _why_not_resumable(directory: RunDirectory, remote: Remote | None) -> str:
    """For --resume: a sentence where there is no checkpoint to go on from, else nothing."""
    if remote is not None and remote.steps():
        return ""
    why = "it has none"
    for folder in reversed(written(directory.checkpoints)):
        try:
            check(folder)
            return ""
        except DamagedCheckpoint as error:
            why = str(error)
    return f"error: --resume: no checkpoint in {directory.path} can be gone on from: {why}"
