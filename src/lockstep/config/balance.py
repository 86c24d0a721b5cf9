"""What was asked for about ranks of different speed: who computes how many of a step's
micro-batches. No torch here.

    auto      as measured: shares follow what a micro-batch takes on each rank (data/balancer.py)
    2,1,1     as given: a number for each rank, in proportion to which micro-batches are dealt out

The micro-batches stay the same, and so do the samples, the dropout and the order of addition of
exact mode: only who computes them moves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

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
        bad = [
            each
            for each in self.weights
            if isinstance(each, bool)
            or not isinstance(each, int | float)
            or not 0 <= each < math.inf
        ]
        if bad or not any(self.weights):
            why = f"{bad[0]!r} is no share" if bad else "nobody would have anything to do"
            raise UsageError(
                f"balance={str(self)!r}: {why}; give auto, or a number from 0 for each rank, not"
                " all 0, such as 2,1,1"
            )

    @classmethod
    def of(cls, given: str | Sequence[float]) -> Balance:
        """`auto`, `2,1,1`, or the numbers themselves. Raises UsageError."""
        if given == AUTO:
            return cls()
        try:
            weights = tuple(map(float, given.split(",")) if isinstance(given, str) else given)
        except (TypeError, ValueError):
            raise UsageError(
                f"balance={given!r}: give auto, or a number for each rank, such as 2,1,1"
            ) from None
        return cls(weights)

    @property
    def measured(self) -> bool:
        return self.weights is None

    def check(self, method: Parallelism, ranks: int) -> None:
        """Raise a UsageError where it does not go together with the method, or has another
        number of ranks.
        """
        given = f"balance={str(self)!r}"
        self.check_count(ranks)
        if method.server is not None:
            raise UsageError(
                f"{given} with update={method.update!r}: ranks draw micro-batches as fast as they"
                " are; leave balance out"
            )
        if method.sync_every is not None and self.measured:
            raise UsageError(
                f"{given} with sync_every={method.sync_every}: ranks that step alone do not tell"
                " each other how long they take; give a number for each rank, such as 2,1,1"
            )
        if method.mesh is not None and not method.mesh.only_data:
            raise UsageError(
                f"{given} with mesh={str(method.mesh)!r}: ranks that hold parts of one model take"
                " as long as the slowest of them; leave one out"
            )

    def check_count(self, ranks: int) -> None:
        """Raise a UsageError for weights of another number of ranks."""
        if self.weights is not None and len(self.weights) != ranks:
            raise UsageError(
                f"balance={str(self)!r} gives {len(self.weights)} of {ranks} workers a share: give"
                " one number for each of them"
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
