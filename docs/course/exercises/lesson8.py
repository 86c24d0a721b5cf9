"""Exercise 8: one order of addition, and a checkpoint that is whole or absent.

Grade it with `pytest docs/course -k lesson8`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor


def tree_sum(parts: Sequence[Tensor | None]) -> Tensor | None:
    """Add along a balanced binary tree: neighbours in pairs, then the pairs, and so on.

    The tree has as many leaves as the next power of two: with 5 parts it has 8, and 3 of them are
    absent. A None is absent too. If one of two neighbours is absent, their sum is the other one,
    unchanged. If both are, it is absent. If all are, return None.

    Args:
        parts: of one shape; part i belongs to micro-batch i.
    """
    raise NotImplementedError


def save_whole(path: Path, state: Any) -> None:
    """Write `state` with `torch.save`, so that `path` holds a whole checkpoint at any moment.

    If the process is killed, or torch.save raises, while this function runs, `path` still holds
    what it held before. After an exception nothing else is left in its folder.
    """
    raise NotImplementedError
