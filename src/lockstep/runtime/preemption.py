"""Whether this process was asked to stop: a signal handler notes it, and a training reads it in
every step.

    SIGTERM, SIGUSR1 -> a rank notes it and tells its launcher, which tells the other ranks
                     -> all stop after the same step, save, and exit with 75

A rank leaves marks for its launcher: files in the directory of its record.

The handler only notes the signal, since it may arrive at any point. Without Lockstep's launcher the
other ranks learn of it in the facts of their next step. launcher/stop.py is the launcher's side.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from lockstep.runtime.failure_record import DIRECTORY, rank_file

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
HEEDS = "heeds"
"""Kind of a file that a rank leaves for the launcher: it stops by itself when asked."""
RESUMED, SAVED = "resumed", "saved"
"""Kinds of files that rank 0 leaves for the launcher. "resumed": it has loaded a checkpoint. "saved":
it has saved one that it would resume from.
"""

asked = False
"""Whether a scheduler, a user or another rank has asked this process to stop."""


def listen() -> Callable[[], None]:
    """Note signals from now on instead of dying from them. Returns a function that undoes this.
    Handlers belong to the main thread: in another thread this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        return lambda: None
    before = {number: signal.signal(number, _note_signal) for number in SIGNALS}
    leave_mark(HEEDS)

    def restore() -> None:
        global asked
        asked = False
        if _note_signal not in before.values():
            _remove_mark(HEEDS)
        restore_handlers(before)

    return restore


def _note_signal(number: int, frame: FrameType | None) -> None:
    global asked
    if not asked:
        asked = True
        directory = os.environ.get(DIRECTORY)
        if directory is not None:
            with suppress(OSError):
                asked_file(Path(directory)).touch()


def asked_file(directory: Path) -> Path:
    """Return the file that exists when some rank has been asked to stop. All ranks leave the same
    one, so that the launcher looks for one, however many ranks there are.
    """
    return directory / "asked"


def leave_mark(kind: str) -> None:
    """Leave a mark of this kind for the launcher, if there is one."""
    file = _mark(kind)
    if file is not None:
        with suppress(OSError):
            file.touch()


def _remove_mark(kind: str) -> None:
    file = _mark(kind)
    if file is not None:
        with suppress(OSError):
            file.unlink()


def _mark(kind: str) -> Path | None:
    directory = os.environ.get(DIRECTORY)
    if directory is None:
        return None
    return rank_file(Path(directory), int(os.environ.get("RANK", "0")), kind)


def restore_handlers(handlers: Mapping[signal.Signals, Any]) -> None:
    """Install the handlers, by signal."""
    for number, handler in handlers.items():
        signal.signal(number, handler)
