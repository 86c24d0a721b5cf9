"""The folder of one run, and the lock that keeps a second run out of it.

The lock is the kernel's (flock). It ends with its owner, so a killed process leaves no lock. The
lock's file also identifies the folder: an owner notices if its folder was removed or replaced, and
then does not write to it. All files get the permissions of the umask. No torch here: the launcher
claims the folder before any rank starts.
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import chain, count
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING

from lockstep.checkpoints.folders import sweep, written
from lockstep.checkpoints.manifest import check
from lockstep.config.settings import FILE, Settings
from lockstep.errors import DamagedCheckpoint, ExitCode, LockstepError, UsageError
from lockstep.runtime import disk
from lockstep.training import result
from lockstep.training.resolve import short_name

if TYPE_CHECKING:
    from lockstep.checkpoints.remote import Remote

METRICS = "metrics.jsonl"
RESULT = "result.json"
_LOCK = "lock"
_MARK = "mark"
_CHECKPOINTS = "checkpoints"
_BEFORE = "before-"
_CLAIMED = (_LOCK, _MARK, FILE)
_PASSING = re.compile(
    rf"{_LOCK}|{_MARK}|{FILE}|{METRICS}|{_CHECKPOINTS}(-\d+)?|anatomy|grow|wanted|rank-\d+\.log"
    r"|events\.out\.tfevents\..*"
    r"|loggers\.json|wandb|mlflow\.db(-journal|-wal|-shm)?|mlartifacts|metrics\.csv"
)
_START = 2**20  # bytes: without a step, metrics.jsonl is never larger
_TRIES = 10  # attempts to make a folder that others may remove
_GONE = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE, errno.ELOOP)


class RunDirectory:
    """A claimed folder: `path` and what lies in it. Made by `claim`, or by `of_launcher` in a
    rank whose launcher holds the claim.
    """

    def __init__(
        self,
        path: Path,
        lock: IO[bytes] | None = None,
        *,
        made_here: bool = False,
        above: Sequence[Path] = (),
    ) -> None:
        self.path = path
        self.metrics = path / METRICS
        self.result = path / RESULT
        self.checkpoints = path / _CHECKPOINTS
        self.grow = path / "grow"
        """Exists after the ranks ended at a checkpoint to continue with more workers."""
        self.wanted = path / "wanted"
        """Exists while the ranks are asked to end at their next checkpoint, because more hosts are
        there.
        """
        self._lock = lock
        self.made_here = made_here
        self._above = above  # parent folders that were made for it, the innermost first
        self._lock_file = (path / _LOCK).absolute()
        self._identity = _identity(self._lock_file if lock is None else lock)

    @property
    def shown(self) -> str:
        """The path as it can be typed here: relative if it is below the working directory."""
        relative = os.path.relpath(self.path)
        return str(self.path.absolute()) if relative.startswith("..") else relative

    @property
    def begun(self) -> bool:
        """Whether a training has started here and has not ended."""
        return self.metrics.exists() and not self.result.exists()

    def check(self) -> None:
        """Raise LockstepError if `path` is no longer the claimed folder (removed, moved, emptied or
        replaced), or has become read-only.
        """
        try:
            identity = _identity(self._lock_file)
        except OSError:
            return  # the file system does not answer now: the next check tells
        if self._identity is None or identity == self._identity:
            if not disk.writable(self.path):
                raise LockstepError("run-directory-read-only", path=str(self.path))
            return
        change = "was replaced by another folder of that name"
        if identity is None:
            change = "was removed, moved or emptied"
        raise LockstepError("run-directory-gone", path=str(self.path), what=change)

    @classmethod
    def claim(
        cls, path: Path | str | None, name: str, *, fresh: bool = False, extends: bool = False
    ) -> RunDirectory:
        """Make and lock `path`; None: runs/NAME-DATE-TIME under the current folder. A run that is
        there is resumed, or set aside if `fresh`. A finished one goes on if `extends`.

        Raises UsageError if the folder cannot be written, is used by another run (with its pid and
        host), or holds a finished run or other files.
        """
        if not isinstance(path, Path):  # one that is a Path stays of its own class
            path = Path(path) if path else unused(name)
        above = [folder for folder in path.parents if not folder.exists()]
        made_here, lock = _locked(path)
        claimed = cls(path, lock, made_here=made_here, above=above)
        try:
            with _usage_errors(path):
                _sign(lock)
                for unfinished in path.glob("*.json*.[0-9]*.unfinished"):  # of killed writers
                    unfinished.unlink(missing_ok=True)
                for folder in (path, *above):  # else a power failure may lose the checkpoints
                    with suppress(PermissionError):
                        disk.force(folder.parent)
                if fresh:
                    _set_aside(path)
            if not (fresh or extends) and claimed.result.exists():
                raise UsageError("run-finished", path=str(path))
        except BaseException:
            claimed.release()
            raise
        return claimed

    @classmethod
    def of_launcher(cls, path: Path) -> RunDirectory:
        """Return the folder in a rank. Its launcher, which outlives the rank, holds the lock."""
        return cls(path)

    def leave_mark(self) -> tuple[str, str]:
        """Write a random text into a file of the folder; return the file and the text. A process
        that can read the text sees the same folder.
        """
        file = self.path.absolute() / _MARK
        mark = secrets.token_hex(8)
        file.write_text(mark, encoding="utf-8")
        return str(file), mark

    def release(self, *, failed: bool = False) -> None:
        """Unlock. If the folder was made here and nothing has happened in it, also remove it, so
        that the command can be corrected and repeated.

        `failed`: also remove what a run has left that failed before its first step. A folder with
        files of others stays.
        """
        if self._lock is None:
            return
        with suppress(OSError):  # another run may use the folder, or somebody has moved it
            own = self.made_here and _identity(self._lock_file) == self._identity
            if own and (self.is_unused or (failed and not self.trained)):
                _remove(self.path)
                for folder in self._above:
                    folder.rmdir()
        self._lock.close()
        self._lock = None

    @property
    def is_unused(self) -> bool:
        """Whether the folder has nothing but what a claim leaves, and empty logs."""
        for path in self.path.iterdir():
            empty_log = path.suffix == ".log" and path.stat().st_size == 0
            if path.name not in _CLAIMED and not empty_log:
                return False
        return True

    @property
    def trained(self) -> bool:
        """Whether the folder has a step, a checkpoint or a result, or a file that is not ours."""
        if not all(_PASSING.fullmatch(path.name) for path in self.path.iterdir()):
            return True
        if self.checkpoints.is_dir() and any(self.checkpoints.iterdir()):
            return True
        if not self.metrics.exists():
            return False
        if self.metrics.stat().st_size > _START:
            return True
        return b'"kind": "step"' in self.metrics.read_bytes()

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release(failed=isinstance(error, Exception))


def write_settings(directory: RunDirectory, settings: Settings) -> None:
    """Write the settings of a run that starts or resumes here. Raises UsageError if an unfinished
    run here is another training.
    """
    if directory.begun:
        before = Settings.read(directory.path)
        if settings.threads is None and not settings.exact:
            settings = replace(settings, threads=before.threads)
        # the checkpoint decides about steps that are left out: later ones may change
        differences = "; ".join(settings.differences(replace(before, skip=settings.skip)))
        if differences:
            run = f"unfinished run {directory.path}"
            raise UsageError("another-training", place=run, differences=differences)
    with _usage_errors(directory.path):
        settings.write(directory.path)


def finished_before(settings: Settings, run: Path, *, resume: bool, fresh: bool) -> bool:
    """Whether `run` holds the result of this training, so that nothing is left to train: true for
    the same command after its end, or with `resume`.
    """
    if fresh or not (run / RESULT).exists():
        return False
    return resume or not settings.differences(Settings.read(run))


def _extends(settings: Settings, run: Path | None) -> bool:
    """Whether `settings` train the finished run in `run` for more epochs or steps, and change nothing
    else.
    """
    if run is None:
        return False
    with suppress(OSError, ValueError, LookupError, TypeError, UsageError):
        # no finished run, or not one of ours
        done = result.read(run / RESULT)
        if (settings.epochs or 0) > done["epochs"] or (settings.steps or 0) > done["steps"]:
            before = Settings.read(run)
            as_long = replace(settings, epochs=before.epochs, steps=before.steps, skip=before.skip)
            return not as_long.differences(before)
    return False


def claimed(settings: Settings, run: Path | None, *, resume: bool, fresh: bool) -> RunDirectory:
    """Claim the directory `run` (None: a new one). If `fresh`, also set its copies elsewhere aside.

    Raises UsageError if the directory cannot be used or a logger's package is missing. If `resume`
    finds no checkpoint, prints a sentence on stderr and raises SystemExit with 77.
    """
    if settings.log:
        from lockstep.training.loggers import check_installed  # before anything is made

        check_installed(settings.log)
    extends = not fresh and _extends(settings, run)
    directory = RunDirectory.claim(run, short_name(settings.task), fresh=fresh, extends=extends)
    try:
        if extends:
            before = Settings.read(directory.path)
            directory.result.unlink(missing_ok=True)
            replace(before, epochs=settings.epochs, steps=settings.steps).write(directory.path)
        remote = None
        if settings.checkpoints is not None:
            from lockstep.checkpoints.remote import Remote  # imports fsspec

            remote = Remote(settings.checkpoints)
        if remote is not None and fresh:
            remote.set_aside()
        if resume:
            _check_resumable(directory, remote)
        write_settings(directory, settings)
    except BaseException:
        directory.release()
        raise
    return directory


def _check_resumable(directory: RunDirectory, remote: Remote | None) -> None:
    """If there is no checkpoint to resume from, print the reason and raise SystemExit with 77."""
    if remote is not None and remote.steps():
        return
    reason = "it has none"
    sweep(directory.checkpoints)
    for folder in reversed(written(directory.checkpoints)):
        try:
            check(folder)
            return
        except DamagedCheckpoint as error:
            reason = str(error)
    print(
        f"error: --resume: no checkpoint in {directory.path} can be resumed: {reason}",
        flush=True,
        file=sys.stderr,
    )
    raise SystemExit(ExitCode.NO_CHECKPOINT)


def _set_aside(path: Path) -> None:
    """Move the files of a run into before-1, before-2, ... in its folder."""
    earlier = {path / _LOCK, *path.glob(f"{_BEFORE}*")}
    files = [file for file in path.iterdir() if file not in earlier]
    if not files:
        return
    folders = (path / f"{_BEFORE}{number}" for number in count(1))
    aside = next(folder for folder in folders if not folder.exists())
    aside.mkdir()
    for file in files:
        file.rename(aside / file.name)


def unused(name: str) -> Path:
    """Return runs/NAME-DATE-TIME, with a number behind it if that exists."""
    base = Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    numbered = (base.with_name(f"{base.name}-{number}") for number in count(2))
    return next(path for path in chain([base], numbered) if not path.exists())


def _remove(path: Path) -> None:
    """Remove the folder, with its lock last: until then no other run can claim the folder and lose
    what it writes there.
    """
    for file in path.iterdir():
        if file.is_dir() and not file.is_symlink():
            disk.remove_tree(file)
        elif file.name != _LOCK:
            file.unlink()
    (path / _LOCK).unlink()
    path.rmdir()


def _locked(path: Path) -> tuple[bool, IO[bytes]]:
    """Make the folder if necessary and take its lock; return whether it was made, and the lock."""
    tries = count(1)
    while True:
        with _usage_errors(path):
            try:
                made_here = not path.exists()
                if path.is_dir() and not (path / _LOCK).exists() and any(path.iterdir()):
                    raise UsageError("run-directory-not-empty", path=str(path))
                path.mkdir(parents=True, exist_ok=True)
                lock = (path / _LOCK).open("a+b", buffering=0)
            except (FileNotFoundError, FileExistsError):
                if next(tries) < _TRIES:  # its owner may have removed it in between
                    continue
                raise
        try:
            disk.lock(lock)
        except BlockingIOError:
            owner = _owner(lock)
            lock.close()
            raise UsageError("run-directory-in-use", path=str(path), owner=owner) from None
        if _identity(path / _LOCK) == _identity(lock):
            return made_here, lock
        lock.close()  # its owner has removed the file in between: this lock protects nothing


def _sign(lock: IO[bytes]) -> None:
    lock.truncate(0)
    lock.write(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode())


def _identity(lock: Path | IO[bytes]) -> tuple[int, int] | None:
    """Return device and inode of the lock's file; None if there is none. Raises OSError if the file
    system does not answer.
    """
    try:
        status = lock.stat() if isinstance(lock, Path) else disk.status_of(lock)
    except OSError as error:
        if error.errno in _GONE:
            return None
        raise
    return status.st_dev, status.st_ino


def _owner(lock: IO[bytes]) -> str:
    with suppress(ValueError, KeyError):
        lock.seek(0)
        owner = json.loads(lock.read(4096))
        return f"process {owner['pid']} on {owner['host']}"
    return "another process"  # it has locked the file but not yet written its name


@contextmanager
def _usage_errors(path: Path) -> Iterator[None]:
    """Raise a UsageError in place of an OSError in the block."""
    try:
        yield
    except OSError as error:
        reason = str(error.strerror)
        if isinstance(error, FileExistsError | NotADirectoryError):
            reason = "it, or a folder above it, is a file"
        raise UsageError("run-directory-not-writable", path=str(path), reason=reason) from None
