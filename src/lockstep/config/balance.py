"""The option `balance`: how many of a step's micro-batches each rank computes, for ranks of
different speed. This file does not import torch.

    auto      measured: shares follow the time per micro-batch on each rank (data/balancer.py)
    2,1,1     given: one number for each rank; micro-batches are divided in this proportion

The micro-batches stay the same, and so do the samples, the dropout and exact mode's order of
addition. Only the rank that computes a micro-batch changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.config import knob
from lockstep.config.parallelism import Parallelism
from lockstep.errors import UsageError

AUTO = "auto"


@dataclass(frozen=True, slots=True)
class Balance:
    """The shares of the ranks. Raises UsageError for weights that cannot be shares."""

    weights: tuple[float, ...] | None = None
    """One number for each rank, in the order of ranks; None: measured shares."""

    def __post_init__(self) -> None:
        if self.weights is None:
            return
        with knob.within(f"balance={str(self)!r}"):
            for each in self.weights:
                knob.number("share", each, least=0)
        if not any(self.weights):
            raise UsageError("nobody-has-work", balance=str(self))

    @classmethod
    def of(cls, given: str | Sequence[float]) -> Balance:
        """Read `auto`, `2,1,1`, or a sequence of numbers. Raises UsageError for other values."""
        if given == AUTO:
            return cls()
        try:
            weights = tuple(map(float, given.split(",")) if isinstance(given, str) else given)
        except (TypeError, ValueError):
            expected = "auto, or a number for each rank, such as 2,1,1"
            raise UsageError("wrong-type", name="balance", value=given, expected=expected) from None
        return cls(weights)

    @property
    def measured(self) -> bool:
        return self.weights is None

    def check(self, method: Parallelism, ranks: int) -> None:
        """Raise a UsageError if it cannot be combined with the method, or has weights for another
        number of ranks.
        """
        self.check_count(ranks)
        balance = str(self)
        if method.server:
            raise UsageError("balance-with-server", balance=balance, update=method.update)
        if method.sync_every is not None and self.measured:
            raise UsageError(
                "balance-with-sync-every", balance=balance, sync_every=method.sync_every
            )
        if method.mesh is not None and not method.mesh.only_data:
            raise UsageError("balance-with-mesh", balance=balance, mesh=str(method.mesh))

    def check_count(self, ranks: int) -> None:
        """Raise a UsageError if the weights are for another number of ranks."""
        if self.weights is not None and len(self.weights) != ranks:
            raise UsageError(
                "balance-of-other-count", balance=str(self), given=len(self.weights), workers=ranks
            )

    def __str__(self) -> str:
        """Return the text that `of` reads."""
        return (
            AUTO
            if self.weights is None
            else ",".join(
                f"{each:g}" if isinstance(each, int | float) else str(each) for each in self.weights
            )
        )
