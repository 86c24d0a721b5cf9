"""The options `keep` and `keep_bytes`: which checkpoints stay. checkpoints/folders.py applies them.
This file does not import torch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from lockstep.config import knob
from lockstep.errors import UsageError

ALL = "all"
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kKMGT]?)(i?)B")
_POWERS = {"": 0, "k": 1, "K": 1, "M": 2, "G": 3, "T": 4}


@dataclass(frozen=True, kw_only=True, slots=True)
class Retention:
    """Which checkpoints stay besides the newest, the best and the last compared one."""

    count: int | None = None
    """The newest ones, by their number. None: thinned by age."""
    everything: bool = False
    """Whether all stay."""
    most_bytes: int | None = None
    """Bytes of all checkpoints of the run."""

    @classmethod
    def of(cls, keep: int | str | None, keep_bytes: int | str | None = None) -> Retention:
        """Read the two options: a number, "all" or None; and a size, such as 20GB. Raises
        UsageError for other values.
        """
        most = None if keep_bytes is None else _size(keep_bytes)
        if keep == ALL:
            return cls(everything=True, most_bytes=most)
        if isinstance(keep, str) and keep.isdecimal():
            keep = int(keep)
        if keep is None or (isinstance(keep, int) and keep >= 1 and keep is not True):
            return cls(count=keep, most_bytes=most)
        expected = "a number of checkpoints of at least 1, or all"
        raise UsageError("wrong-value", name="keep", value=keep, expected=expected)


def _size(value: int | str) -> int:
    """Return a size in bytes: 3000, "1.5GB", "20GiB". Raises UsageError for other values."""
    if isinstance(value, int):
        return knob.whole("keep_bytes", value)
    match = _SIZE.fullmatch(value.strip())
    size = 0
    if match:
        number, unit, binary = match.groups()
        size = int(float(number) * (1024 if binary else 1000) ** _POWERS[unit])
    if size < 1:
        expected = "a size with its unit, such as 500MB or 20GiB"
        raise UsageError("wrong-value", name="keep_bytes", value=value, expected=expected)
    return size
