"""How many intra-op threads torch computes with, for a while.

The number belongs to the process, not to a model: what sets it puts the old one back.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def intra_op_threads(count: int | None) -> Iterator[None]:
    """torch computes with that many threads within the block; None leaves them as they are (the cores shared among the host's ranks)."""
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
