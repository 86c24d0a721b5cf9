"""The norm of all gradients, as one process would see it, and the factor that clips them.

Squares are added in blocks of fixed places, and the blocks one after another. So the norm has the
same bits whichever rank adds which block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from lockstep.collectives.addition_order import BLOCK
from lockstep.collectives.group import Group
from lockstep.gradients.reducer import Reducer

_PIECE = 256 * BLOCK  # elements squared at a time: their squares fit into a core's cache


def block_sums(flat: Tensor) -> Tensor:
    """The sum of |z|^2 of every BLOCK elements of a flat tensor, in float32 or wider; shape
    [ceil(n / BLOCK)].
    """
    if flat.device.type != "cpu" or flat.numel() <= _PIECE:
        return _sums(flat)
    return torch.cat(list(map(_sums, flat.split(_PIECE))))


def _sums(flat: Tensor) -> Tensor:
    full = flat.numel() // BLOCK * BLOCK
    wide = flat.to(torch.promote_types(flat.dtype, torch.float32))
    squares = (wide * wide.conj()).real
    sums = squares[:full].view(-1, BLOCK).sum(1)
    if full == flat.numel():
        return sums
    rest = squares[full:].sum()
    return torch.cat([sums, rest.view(1)])


def norm_of(sums: Sequence[Tensor]) -> Tensor:
    """The Euclidean norm from the block sums of all flat tensors, in order: float64, 0-d, on the
    device of the first tensor. It does not wait for the device.
    """
    device = sums[0].device
    wide = []
    for blocks in sums:
        wide.append(blocks.to(device, torch.float64))
    return torch.cat(wide).sum().sqrt()


class InBuckets:
    """Gradients summed over the ranks, as an update holds them on this rank: a reducer's sums,
    which every rank has in full.
    """

    spread: Sequence[Group] = ()
    """Groups whose members hold different parts of these gradients."""

    def __init__(self, reducer: Reducer) -> None:
        self._reducer = reducer
        self.device = reducer.parameters[0].device

    def flats(self) -> Sequence[Tensor]:
        """This rank's gradients, in flat tensors."""
        return self._reducer.sums

    def blocks(self) -> list[Tensor]:
        """The block sums of all gradients, in the order in which one rank would have them. A
        collective if the gradients are spread over ranks.
        """
        return list(map(block_sums, self.flats()))

    def named(self) -> Iterable[tuple[str, Tensor]]:
        """This rank's gradients, by the names of their parameters."""
        reducer = self._reducer
        return [
            (name, parameter.grad)
            for name, parameter in zip(reducer.names, reducer.parameters, strict=True)
            if parameter.grad is not None
        ]


def clip_factor(norm: Tensor, clip: float) -> Tensor:
    """The factor that bounds a gradient of that norm by `clip`, as torch's clip_grad_norm_ does."""
    return (clip / (norm + 1e-6)).clamp(max=1.0)


Norm = Callable[[InBuckets, float], Tensor]
"""Returns the norm of the model's gradient, from sums that are still to be divided by a number.
float64, 0-d. A collective.
"""


def whole_norm(summed: InBuckets, divisor: float) -> Tensor:
    """The norm if the gradients are those of the whole model."""
    return norm_of(summed.blocks()) / divisor
