"""Weights of a sharded update: a change on one rank must be found in the same step, for the next all-gather overwrites it everywhere.

Each rank digests its weights before the last backward of a step, and the number travels with the facts of that step. That is done in every
step where it takes less than 0.1 ms or 1 % of the step, and else as often as it costs 1 % of the time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from time import perf_counter

from torch import Tensor

from lockstep.checks.digest import digest
from lockstep.gradients.facts import Facts, FactsMessage

_FREE = 1e-4  # seconds
_SHARE = 0.01  # of the time of a step
_RAREST = 100  # steps
_EXACT = 2**52 - 1  # float64 has integers up to here exactly


class OverwrittenCheck:
    """Compares weights within a step. Every rank makes it, and calls it alike."""

    def __init__(self) -> None:
        self._next = 0
        self._fastest = math.inf  # seconds of a digest: what one takes that is not interrupted

    def tell(self, facts: FactsMessage, step: int, weights: Sequence[Tensor]) -> None:
        """Add a digest of `weights` to the facts of `step`, where it is due."""
        if weights and step >= self._next:
            begin = perf_counter()
            found = digest(weights) & _EXACT
            self._fastest = min(self._fastest, perf_counter() - begin)
            facts.add_weights(found, self._fastest)

    def differ(self, facts: Facts, step: int) -> bool:
        """Whether some rank used other weights in `step`. From the facts: the same answer on all ranks."""
        if step < self._next or not any(facts.weights_by_rank):
            return False
        digesting = max(facts.digesting_by_rank)
        seconds = max(map(sum, zip(facts.busy_by_rank, facts.waited_by_rank, strict=True)))  # 0 in the first step
        if digesting > _FREE and seconds > 0:
            self._next = step + min(_RAREST, max(1, math.ceil(digesting / (_SHARE * seconds))))
        return len(set(facts.weights_by_rank)) > 1
