"""Finds where a nan came from: checks gradients as they land, before the sum makes them equal on
all ranks.

The check costs a pass over every gradient. So a Stepper checks only if asked to
(`trace_nonfinite=True`), and in the window after one that was skipped for a gradient or loss that
was not finite. The host reads nothing until there is something to report.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lockstep.collectives.fingerprints import listed
from lockstep.gradients.reducer import Reducer

_NONE = -1


class NonFiniteTrace:
    """Watches the gradients of one reducer. `always`, or only in a window for which `watch` was
    called.
    """

    def __init__(self, reducer: Reducer, *, always: bool) -> None:
        self._reducer = reducer
        self._always = always
        self.due = always
        """Whether the next window's gradients are looked at."""
        self.micro_batch = 0
        """This rank's micro-batch in the window."""
        # (micro-batch, parameter, whether its whole gradient is finite)
        self._gradients: list[tuple[int, int, Tensor]] = []

    @property
    def watched(self) -> bool:
        """Whether this window's gradients are looked at."""
        return self._reducer.on_ready is not None

    def watch(self) -> None:
        """Look at the next window's gradients."""
        self.due = True

    def begin(self) -> None:
        """Begin a window."""
        self._gradients.clear()
        self._reducer.on_ready = self._add if self.due else None
        self.due = self._always

    def _add(self, number: int, gradient: Tensor) -> None:
        if gradient.is_sparse:
            gradient = gradient.coalesce().values()
        self._gradients.append((self.micro_batch, number, gradient.isfinite().all()))

    def tell(self, losses_by_rank: Sequence[float]) -> str:
        """Return sentences that name the ranks whose loss is not finite and, if gradients were
        watched, each rank's first such gradient. A collective.
        """
        ranks = [rank for rank, loss in enumerate(losses_by_rank) if not math.isfinite(loss)]
        losses = f"The loss of {listed(ranks)} is not finite. " if ranks else ""
        if not self.watched:
            return f"{losses}The next window's gradients are checked one by one, before they are summed"
        group = self._reducer.group
        first = torch.tensor(self._first(), device=self._reducer.parameters[0].device)
        table = group.all_gather(first, place="for the trace of a nan").view(group.size, 2)
        gradients = [
            f"{self._reducer.names[number]!r} on rank {rank} (micro-batch {micro_batch} of its"
            " window)"
            for rank, (micro_batch, number) in enumerate(table.tolist())
            if number != _NONE
        ]
        if not gradients:
            return f"{losses}Every rank's gradients were finite before the sum"
        shown = ", ".join(gradients)
        return f"{losses}Before the sum, the first gradient that is not finite: {shown}"

    def _first(self) -> list[int]:
        """[micro-batch, parameter] of the first gradient that landed here and was not finite."""
        if self._gradients:
            flags = torch.stack([finite for *_, finite in self._gradients]).tolist()
            for (micro_batch, number, _), finite in zip(self._gradients, flags, strict=True):
                if not finite:
                    return [micro_batch, number]
        return [_NONE, _NONE]
