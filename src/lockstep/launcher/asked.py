"""A rank's side of being asked to stop: a signal is noted, and whoever trains ends at a step that
all ranks agree on.

    SIGTERM, SIGUSR1 -> noted, and told to the launcher, which tells the other ranks -> all stop
    after the same step, save, leave with 75

A handler does no more than that: the one that a signal meets may be anywhere. Without a launcher of
ours the other ranks hear of it in the facts of their next step. (Loader workers, which some
schedulers send the same signals: orphans.heed_parent_only.)
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from lockstep.launcher import failures

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
HEEDS, ASKED, SPARE = "heeds", "asked", "spare"
"""Files that a rank leaves for the launcher: it will stop by itself when asked; it has been
asked; the others can do without it if it is killed.
"""

_asked = False


def listen() -> Callable[[], None]:
    """Heed signals from now on, in place of dying of them; gives what ends that. Handlers belong
    to the main thread: from another nothing is done.
    """
    if threading.current_thread() is not threading.main_thread():
        return lambda: None
    before: dict[signal.Signals, Any] = {number: signal.signal(number, _note) for number in SIGNALS}
    _tell(HEEDS)

    def restore() -> None:
        global _asked
        _asked = False
        for number, handler in before.items():
            signal.signal(number, handler)

    return restore


def to_stop() -> bool:
    """Whether this process was asked to stop."""
    return _asked


def spare(yes: bool) -> None:
    """Tell the launcher whether the other ranks go on if this one is killed now."""
    directory = os.environ.get(failures.DIRECTORY)
    if directory is None:
        return
    file = mark(Path(directory), int(os.environ.get("RANK", "0")), SPARE)
    with suppress(OSError):
        file.touch() if yes else file.unlink(missing_ok=True)


def mark(directory: Path, rank: int, what: str) -> Path:
    """The file by which a rank tells its launcher so."""
    return directory / f"rank-{rank}.{what}"


def _note(number: int, frame: FrameType | None) -> None:
    global _asked
    if not _asked:
        _asked = True
        _tell(ASKED)


def _tell(what: str) -> None:
    directory = os.environ.get(failures.DIRECTORY)
    if directory is not None:
        with suppress(OSError):
            mark(Path(directory), int(os.environ.get("RANK", "0")), what).touch()
