"""Files that a training writes and can do without: where one cannot be written, it ends with a
warning that names it, and training goes on.
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path

from lockstep.errors import LockstepWarning

_BUFFER = 2**16  # bytes


class TelemetryFile:
    """Appends to `file` through one descriptor. What waits to be written is lost with a process
    that is killed.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._waiting = bytearray()
        self._handle: int | None = None
        try:
            file.parent.mkdir(exist_ok=True)
            self._handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        except OSError as error:
            self._give_up(error)

    def write(self, octets: bytes) -> None:
        self._waiting += octets
        if len(self._waiting) > _BUFFER:
            self.flush()

    def flush(self) -> None:
        octets, self._waiting = self._waiting, bytearray()
        try:
            while octets and self._handle is not None:
                del octets[: os.write(self._handle, octets)]
        except OSError as error:
            self._give_up(error)

    def close(self) -> None:
        self.flush()
        self._end()

    def _give_up(self, error: OSError) -> None:
        self._end()
        warnings.warn(
            f"{self._file} cannot be written ({error.strerror}): training goes on without it",
            LockstepWarning,
            stacklevel=3,
        )

    def _end(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            os.close(handle)
