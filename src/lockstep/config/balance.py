"""The option `balance`: how many of a step's micro-batches each rank computes, for ranks of
different speed: `2,1,1` is one number for each rank, and micro-batches are divided in this
proportion. This file does not import torch.

The micro-batches stay the same, and so do the samples, the dropout and exact mode's order of
addition. Only the rank that computes a micro-batch changes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.config import knob
from lockstep.config.parallelism import Parallelism
from lockstep.errors import UsageError


@dataclass(frozen=True, slots=True)
class Balance:
    """The shares of the ranks. Raises UsageError for weights that cannot be shares."""

    weights: tuple[float, ...]
    """One number for each rank, in the order of ranks."""

    def __post_init__(self) -> None:
        with knob.within(f"balance={self.weights}"):
            for weight in self.weights:
                knob.number("share", weight, least=0)
        if not any(self.weights):
            raise UsageError("nobody-has-work", balance=str(self))

    @classmethod
    def of(cls, value: str | Sequence[float]) -> Balance:
        """Read `2,1,1`, or a sequence of numbers. Raises UsageError for other values."""
        try:
            if isinstance(value, str):
                value = [float(weight) for weight in value.split(",")]
            weights = tuple(value)
        except (TypeError, ValueError):
            expected = "a number for each rank, such as 2,1,1"
            raise UsageError(
                "wrong-value", name="balance", value=value, expected=expected
            ) from None
        return cls(weights)

    def check(self, method: Parallelism, ranks: int) -> None:
        """Raise a UsageError if it cannot be combined with the method, or has weights for another
        number of ranks.
        """
        self.check_count(ranks)
        if method.server:
            raise UsageError("balance-with-server", balance=str(self), update=method.update)
        if method.mesh is not None and not method.mesh.only_data:
            raise UsageError("balance-with-mesh", balance=str(self), mesh=str(method.mesh))

    def check_count(self, ranks: int) -> None:
        """Raise a UsageError if the weights are for another number of ranks."""
        if len(self.weights) != ranks:
            raise UsageError(
                "balance-of-other-count", balance=str(self), given=len(self.weights), workers=ranks
            )

    def shares(self, slots: int) -> tuple[int, ...]:
        """Return the number of micro-batches of each rank, out of `slots`. Weight 0 gets none.

        The slowest rank finishes as early as possible if the weights are the ranks' speeds. Among
        equally good shares, the first ranks get more: weights 3,3,3,1 share 16 as 5, 5, 5, 1.
        """
        total = math.fsum(self.weights)
        counts = [int(slots * weight / total) for weight in self.weights]
        working = [rank for rank, weight in enumerate(self.weights) if weight]
        for _ in range(slots - sum(counts)):  # fewer than there are ranks
            first = min(working, key=lambda rank: (counts[rank] + 1) / self.weights[rank])
            counts[first] += 1
        return tuple(counts)

    def __str__(self) -> str:
        """Return the text that `of` reads."""
        return ",".join(knob.text_of(weight) for weight in self.weights)
