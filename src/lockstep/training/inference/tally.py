"""Sums and weights per batch become totals with the same bits at every world size: added in
float64, in the order of the batches.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lockstep.collectives.texts import everybodys
from lockstep.errors import TaskError
from lockstep.world.world import World


class Tally:
    """`tally.totals(mine)` are the weighted means over all `count` batches, equal on all ranks;
    0/0 is nan.
    """

    def __init__(self, world: World, count: int) -> None:
        self._world, self._count = world, count
        self._names: list[str] | None = None

    def pairs(self, found: Mapping[str, tuple[Any, Any]]) -> dict[str, Tensor]:
        """One batch's (sum, weight) by name, each as a tensor of two float64 numbers. Raises
        TaskError for more than one number.
        """
        return {name: self._pair(name, *pair) for name, pair in found.items()}

    def totals(self, mine: Mapping[int, dict[str, Tensor]]) -> dict[str, float]:
        """From this rank's batches, by number, to the totals of all. A collective."""
        if self._names is None:
            said = everybodys(
                sorted(mine[0]) if 0 in mine else None,
                self._world.control,
                "for the names of metrics",
            )
            self._names = next((names for names in said if names is not None), [])
        names = self._names
        table = torch.zeros(self._count, 2 * len(names), dtype=torch.float64)
        for number, sums in mine.items():
            table[number] = _row(sums, names)
        # the others' rows are zeros, so nothing is rounded here
        self._world.control.all_reduce(table).wait()
        totals = [sum(column) for column in table.T.tolist()]
        pairs = zip(totals[::2], totals[1::2], strict=True)
        return {
            name: value / weight if weight else float("nan")
            for name, (value, weight) in zip(names, pairs, strict=True)
        }

    def _pair(self, name: str, value: Tensor | float, weight: Tensor | float) -> Tensor:
        parts = [
            torch.as_tensor(part, dtype=torch.float64, device=self._world.device)
            for part in (value, weight)
        ]
        if any(part.numel() != 1 for part in parts):
            raise TaskError(
                "metric-not-a-number", name=name, shapes=[list(part.shape) for part in parts]
            )
        return torch.stack([part.reshape(()) for part in parts])


def _row(sums: dict[str, Tensor], names: list[str]) -> Tensor:
    if sorted(sums) != names:
        raise TaskError("metric-names-changed", names=sorted(sums), first=names)
    # no -0: a sum with zeros would lose the sign
    return torch.cat([sums[name] for name in names]).cpu() + 0.0 if names else torch.empty(0)
