"""What was asked for about ranks of different speed: who computes how many of a step's
micro-batches. No torch here.

    auto      as measured: shares follow what a micro-batch takes on each rank (data/balancer.py)
    2,1,1     as given: a number for each rank, in proportion to which micro-batches are dealt out

The micro-batches stay the same, and so do the samples, the dropout and the order of addition of
exact mode: only who computes them moves.
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
    """Raises UsageError for weights that cannot be shares."""

    weights: tuple[float, ...] | None = None
    """Of each rank, in their order; None: as measured."""

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
        """`auto`, `2,1,1`, or the numbers themselves. Raises UsageError."""
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
        """Raise a UsageError where it does not go together with the method, or has another
        number of ranks.
        """
        self.check_count(ranks)
        balance = str(self)
        if method.server is not None:
            raise UsageError("balance-with-server", balance=balance, update=method.update)
        if method.sync_every is not None and self.measured:
            raise UsageError(
                "balance-with-sync-every", balance=balance, sync_every=method.sync_every
            )
        if method.mesh is not None and not method.mesh.only_data:
            raise UsageError("balance-with-mesh", balance=balance, mesh=str(method.mesh))

    def check_count(self, ranks: int) -> None:
        """Raise a UsageError for weights of another number of ranks."""
        if self.weights is not None and len(self.weights) != ranks:
            raise UsageError(
                "balance-of-other-count", balance=str(self), given=len(self.weights), workers=ranks
            )

    def __str__(self) -> str:
        """As `of` takes it."""
        return (
            AUTO
            if self.weights is None
            else ",".join(
                f"{each:g}" if isinstance(each, int | float) else str(each) for each in self.weights
            )
        )
