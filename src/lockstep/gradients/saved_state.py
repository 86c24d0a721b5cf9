"""What the parts of a training give to a checkpoint: their state in tensors, by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class TensorPiece:
    """Some of a tensor's elements, or all of them."""

    name: str
    data: Tensor
    """The whole tensor; or, if `shape` and `strides` are given, its elements from `start` on in the
    order of memory, flat.
    """
    start: int = 0
    shape: tuple[int, ...] | None = None
    strides: tuple[int, ...] = ()

    @property
    def key(self) -> str:
        """The piece's name in a file."""
        if self.shape is None:
            return self.name
        stop = self.start + self.data.numel()
        return f"{self.name}[{self.start}:{stop}]"


class KeepsState:
    """A part of a training with a state of its own in tensors: what compression has not sent yet,
    an outer optimizer's momentum.
    """

    def kept(self) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor]]:
        """Return the state by name, without ranks: what is equal on all ranks, and what only this
        rank has. Every rank calls it.
        """
        return {}, {}

    def take_back(
        self, common: Mapping[str, Tensor], by_rank: Sequence[Mapping[str, Tensor]]
    ) -> None:
        """Restore the state. `by_rank` has an entry for every rank of the run that saved it, which
        may be more or fewer than there are now.
        """
        return
