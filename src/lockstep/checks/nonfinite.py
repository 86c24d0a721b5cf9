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
        self._landed: list[tuple[int, int, Tensor]] = []

    @property
    def watched(self) -> bool:
        """Whether this window's gradients are looked at."""
        return self._reducer.on_ready is not None

    def watch(self) -> None:
        """Look at the next window's gradients."""
        self.due = True

    def begin(self) -> None:
        """Begin a window."""
        self._landed.clear()
        self._reducer.on_ready = self._look if self.due else None
        self.due = self._always

    def _look(self, number: int, gradient: Tensor) -> None:
        values = gradient.coalesce().values() if gradient.is_sparse else gradient
        self._landed.append((self.micro_batch, number, values.isfinite().all()))

    def tell(self, losses_by_rank: Sequence[float]) -> str:
        """Return sentences that name the ranks whose loss is not finite and, if gradients were
        watched, each rank's first such gradient. A collective.
        """
        lost = [rank for rank, loss in enumerate(losses_by_rank) if not math.isfinite(loss)]
        whose = f"The loss of {listed(lost)} is not finite. " if lost else ""
        if not self.watched:
            return (
                whose + "The next window's gradients are checked one by one, before they are summed"
            )
        group, device = self._reducer.group, self._reducer.parameters[0].device
        rows = (
            group.all_gather(
                torch.tensor(self._first(), device=device), place="for the trace of a nan"
            )
            .view(group.size, 2)
            .tolist()
        )
        found = [
            f"{self._reducer.names[number]!r} on rank {rank} (micro-batch {micro_batch} of its"
            " window)"
            for rank, (micro_batch, number) in enumerate(rows)
            if number != _NONE
        ]
        if not found:
            return whose + "Every rank's gradients were finite before the sum"
        return f"{whose}Before the sum, the first gradient that is not finite: {', '.join(found)}"

    def _first(self) -> list[int]:
        """[micro-batch, parameter] of the first gradient that landed here and was not finite."""
        if self._landed:
            finite = torch.stack([finite for *_, finite in self._landed]).tolist()
            for (micro_batch, number, _), good in zip(self._landed, finite, strict=True):
                if not good:
                    return [micro_batch, number]
        return [_NONE, _NONE]
