"""Gradients of a compiled module leave while its backward runs, as they do for torch's own wrapper.

torch.compile makes one backward of a whole graph, and all gradients would land at its end. Inside the forward of torch's
DistributedDataParallel the compiler cuts the graph where that wrapper's buckets end; it knows such a forward by a class attribute, which
holds an object with `bucket_bytes_cap`. There is no public way to ask for the cut.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from lockstep.gradients.layout import FIRST_BUCKET

_ATTRIBUTE = "_active_ddp_module"


@dataclass(frozen=True, slots=True)
class _Buckets:
    bucket_bytes_cap: int


@contextmanager
def cut_by_buckets(bucket_bytes: int, *, wanted: bool = True) -> Iterator[None]:
    """What is compiled in this block is cut into graphs of about `bucket_bytes` of parameters. Without `wanted` nothing is changed."""
    ddp: Any = nn.parallel.DistributedDataParallel
    if not wanted or not hasattr(ddp, _ATTRIBUTE):
        yield
        return
    before = getattr(ddp, _ATTRIBUTE)
    setattr(ddp, _ATTRIBUTE, _Buckets(max(bucket_bytes, FIRST_BUCKET)))  # less is refused: the first cut is always there
    try:
        yield
    finally:
        setattr(ddp, _ATTRIBUTE, before)
