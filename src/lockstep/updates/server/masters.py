"""The parameters as a server keeps them: apart from the model's, whose values are as old as the last pull.

Cut into slices and pieces like those of the sharded update, among the first so many ranks, in the memory of the host.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lockstep.collectives.group import Group
from lockstep.collectives.slices import slice_of
from lockstep.gradients.layout import Layout
from lockstep.updates.shards import Shards, flat_view, pieces_of
from lockstep.updates.state_dict import State


class Masters(Shards):
    """The slices of this rank, which may be none, and the pieces that its optimizer takes for parameters: views of them."""

    def __init__(self, parameters: Sequence[nn.Parameter], layout: Layout, group: Group, owners: int) -> None:
        self.parameters, self._layout, self._group, self._shared = parameters, layout, group, None
        self.owners = owners
        self.all_pieces = pieces_of(layout, owners)
        self.pieces = [piece for piece in self.all_pieces if piece.rank == group.rank]
        self.someone_has_none = len({piece.rank for piece in self.all_pieces}) < owners
        self.slices_here = self.of(group.rank)
        """By bucket: which of its elements."""
        self.flats = [torch.zeros(len(mine), dtype=plan.dtype) for mine, plan in zip(self.slices_here, layout.buckets, strict=True)]
        self.places: list[tuple[int, int, int]] = []  # of each piece: bucket, and elements of its slice
        spans = {span.parameter: (plan.index, span.start) for plan in layout.buckets for span in plan.spans}
        self.views, self._mine = [], {}
        for piece in self.pieces:
            index, first = spans[piece.parameter]
            start = first + piece.start - self.slices_here[index].start
            place = self.flats[index][start : start + piece.stop - piece.start]
            place.copy_(flat_view(parameters[piece.parameter])[piece.start : piece.stop])
            self.places.append((index, start, start + len(place)))
            self.views.append(nn.Parameter(place))
            self._mine.setdefault(id(parameters[piece.parameter]), []).append(self.views[-1])

    def of(self, rank: int) -> list[range]:
        """The elements of each bucket that are a rank's."""
        if rank >= self.owners:
            return [range(0) for _ in self._layout.buckets]
        return [slice_of(plan.numel, rank, self.owners) for plan in self._layout.buckets]

    def share(self, rank: int) -> float:
        """Of all elements, how many are a rank's."""
        total = sum(plan.numel for plan in self._layout.buckets)
        return sum(map(len, self.of(rank))) / total

    def give(self, sums: Sequence[Tensor]) -> None:
        """Gradients to the pieces: flat tensors like `flats`."""
        for view, (index, start, stop) in zip(self.views, self.places, strict=True):
            view.grad = sums[index][start:stop]

    def move(self, group: Group) -> None:
        """The same owners are among other ranks now, with the same numbers."""
        self._group = group

    def cut_state(self, optimizer: torch.optim.Optimizer, number: int, whole: State) -> None:
        super().cut_state(optimizer, number, whole)
        for piece, view in zip(self.pieces, self.views, strict=True):
            if piece.parameter == number:
                state = optimizer.state[view]
                for name, value in state.items():
                    if isinstance(value, Tensor):
                        state[name] = value.to(view.device)
