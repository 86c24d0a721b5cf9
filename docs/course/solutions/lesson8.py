"""Solution 8: one order of addition, and a checkpoint that is whole or absent."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def tree_sum(parts: Sequence[Tensor | None]) -> Tensor | None:
    """Add along a balanced binary tree: neighbours in pairs, then the pairs, and so on.

    The tree has as many leaves as the next power of two: with 5 parts it has 8, and 3 of them are
    absent. A None is absent too. If one of two neighbours is absent, their sum is the other one,
    unchanged. If both are, it is absent. If all are, return None.

    Args:
        parts: of one shape; part i belongs to micro-batch i.
    """
    level = list(parts) or [None]
    while len(level) > 1:
        level += [None] * (len(level) % 2)
        level = [_add(a, b) for a, b in zip(level[::2], level[1::2], strict=True)]
    return level[0]


def _add(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    if a is None or b is None:
        return b if a is None else a
    return a + b


def save_whole(path: Path, state: Any) -> None:
    """Write `state` with `torch.save`, so that `path` holds a whole checkpoint at any moment.

    If the process is killed, or torch.save raises, while this function runs, `path` still holds
    what it held before. After an exception nothing else is left in its folder.
    """
    new = path.with_name(path.name + ".new")
    try:
        with new.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())  # on the disk before it gets the name
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)
