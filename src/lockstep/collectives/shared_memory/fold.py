"""Adding up along a balanced binary tree, ((0+1)+(2+3))+...: the order in which shared memory
adds, on every rank the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

_INTO: dict[str, Callable[..., Tensor]] = {
    "sum": torch.add,
    "mean": torch.add,
    "prod": torch.mul,
    "max": torch.maximum,
    "min": torch.minimum,
}


def fold(parts: Sequence[Tensor], op: str, out: Tensor | None = None) -> Tensor:
    """The parts combined along a balanced binary tree, into `out` where it is given."""
    if len(parts) == 1:
        return parts[0].clone() if out is None else out.copy_(parts[0])
    combine = _INTO[op]
    level = list(parts)
    while len(level) > 2:
        level = list(_pairs(level, combine))
    return combine(level[0], level[1], out=out) if out is not None else combine(level[0], level[1])


def _pairs(level: Sequence[Tensor], combine: Callable[..., Tensor]) -> Iterator[Tensor]:
    for first in range(0, len(level) - 1, 2):
        yield combine(level[first], level[first + 1])
    if len(level) % 2:
        yield level[-1]
