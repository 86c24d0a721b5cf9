"""The folder of one run, and the lock that keeps a second run out of it.

The lock is the kernel's (flock), held for as long as the owner lives: it cannot be left behind by a process that was killed.
No torch here: the launcher claims the folder before any rank starts.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType

from lockstep.errors import UsageError
from lockstep.settings import Settings

METRICS = "metrics.jsonl"
RESULT = "result.json"
_LOCK = "lock"
_MARK = "mark"
_CHECKPOINTS = "checkpoints"
_BEFORE = "before-"


class RunDirectory:
    """A claimed folder: `path` and what lies in it. Made by `claim`, or by `of_launcher` in a rank whose launcher holds the claim."""

    def __init__(self, path: Path, lock: int | None = None, *, made_here: bool = False) -> None:
        self.path = path
        self._lock = lock
        self._made_here = made_here

    @property
    def metrics(self) -> Path:
        return self.path / METRICS

    @property
    def result(self) -> Path:
        return self.path / RESULT

    @property
    def grow(self) -> Path:
        """There where the ranks have ended at a checkpoint to go on with more workers."""
        return self.path / "grow"

    @property
    def wanted(self) -> Path:
        """There where the ranks are asked to end at their next checkpoint, because more hosts have come."""
        return self.path / "wanted"

    @property
    def checkpoints(self) -> Path:
        return self.path / _CHECKPOINTS

    @property
    def begun(self) -> bool:
        """Whether a training has begun here, and not come to its end."""
        return self.metrics.exists() and not self.result.exists()

    @classmethod
    def claim(cls, path: Path | str | None, name: str, *, fresh: bool = False) -> RunDirectory:
        """Make and lock `path`; None: runs/NAME-DATE-TIME under the current folder. A run that is there is gone on with; `fresh`: set aside.

        Raises UsageError where it cannot be written, is used by another run (naming its pid and host), or holds a finished
        run or anything else.
        """
        chosen = Path(path) if path is not None else _unused(name)
        with _sentences(chosen):
            made_here = not chosen.exists()
            if chosen.is_dir() and not (chosen / _LOCK).exists() and any(chosen.iterdir()):
                raise UsageError(f"run directory {chosen} holds other files and no run: choose a folder of its own with --run")
            chosen.mkdir(parents=True, exist_ok=True)
            lock = os.open(chosen / _LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            _take(lock, chosen)
            if fresh:
                _set_aside(chosen)
            elif (chosen / RESULT).exists():
                raise UsageError(
                    f"run directory {chosen} already holds a finished run: choose another --run, or --fresh to train anew beside it "
                    "(--resume shows its result)"
                )
        except BaseException:
            os.close(lock)
            raise
        return cls(chosen, lock, made_here=made_here)

    @classmethod
    def of_launcher(cls, path: Path) -> RunDirectory:
        """The same folder, in a rank: the launcher, which outlives it, holds the lock."""
        return cls(path)

    def leave_mark(self) -> str:
        """Write something that nobody else can know into the folder: who reads it looks at the same folder."""
        mark = secrets.token_hex(8)
        (self.path / _MARK).write_text(mark, encoding="utf-8")
        return mark

    @classmethod
    def shared(cls, path: Path, mark: str) -> RunDirectory:
        """The folder that another host has claimed. Raises UsageError where this host sees another one under that name, or none."""
        file = path / _MARK
        if not file.exists() or file.read_text(encoding="utf-8") != mark:
            raise UsageError(
                f"run directory {path} on {socket.gethostname()} is not the one that the first host has claimed: "
                "give --run DIR in a folder that all hosts share"
            )
        return cls(path)

    def release(self) -> None:
        """Unlock. If it was made here and nothing was trained, it is removed: a mistake can be mended and tried again."""
        if self._lock is None:
            return
        if self._made_here and all(map(_says_nothing, self.path.iterdir())):
            shutil.rmtree(self.path)
        os.close(self._lock)
        self._lock = None

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()


def take_over(directory: RunDirectory, settings: Settings) -> None:
    """Write the settings of a run that begins or goes on here. Raises UsageError where it was begun as another training."""
    if directory.begun:
        different = settings.differences(Settings.read(directory.path))
        if different:
            raise UsageError(
                f"run directory {directory.path} holds another training that did not come to its end: {'; '.join(different)}. "
                "Train on as it was, or give --fresh, or another --run"
            )
    settings.write(directory.path)


def _set_aside(path: Path) -> None:
    """Move what a run has left into before-1, before-2, ... in its folder."""
    left = [each for each in path.iterdir() if each.name != _LOCK and not each.name.startswith(_BEFORE)]
    if not left:
        return
    number = 1
    while (path / f"{_BEFORE}{number}").exists():
        number += 1
    aside = path / f"{_BEFORE}{number}"
    aside.mkdir()
    for each in left:
        each.rename(aside / each.name)


def _says_nothing(file: Path) -> bool:
    return file.name in (_LOCK, _MARK, "settings.json") or (file.suffix == ".log" and file.stat().st_size == 0)


def _unused(name: str) -> Path:
    base = Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    number = 2
    path = base
    while path.exists():
        path = base.with_name(f"{base.name}-{number}")
        number += 1
    return path


def _take(lock: int, path: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UsageError(f"run directory {path} is in use by {_owner(lock)}: wait for it, or choose another --run") from None
    os.ftruncate(lock, 0)
    os.pwrite(lock, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode(), 0)


def _owner(lock: int) -> str:
    with suppress(ValueError, KeyError):
        owner = json.loads(os.pread(lock, 4096, 0))
        return f"process {owner['pid']} on {owner['host']}"
    return "another process"  # it has locked the file and not yet written its name


@contextmanager
def _sentences(path: Path) -> Iterator[None]:
    try:
        yield
    except (FileExistsError, NotADirectoryError):
        raise UsageError(f"run directory {path} cannot be made: it, or a folder above it, is a file; choose another --run") from None
    except OSError as error:
        raise UsageError(f"run directory {path} cannot be written ({error.strerror}): choose another --run") from None
