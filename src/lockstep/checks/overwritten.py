"""What a step overwrites must be compared in that step: a change on one rank does not last until
the next check of all replicas.

    sharded weights     the next all-gather overwrites them with their owner's
    moving buffers      a step moves them by the mean of all ranks: a change of a low bit is rounded
                        away, and has moved all

Each rank digests them before the last backward of a step, and the number travels with the facts of
that step. That is done in every step where it takes less than 0.1 ms or 0.5 % of the step, and else
as often as it costs 0.5 % of the time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from time import perf_counter

from torch import Tensor

from lockstep.checks.digest import digest
from lockstep.gradients.facts import Facts, FactsMessage

_FREE = 1e-4  # seconds
_SHARE = 0.005  # of the time of a step
_RAREST = 100  # steps
_EXACT = 2**52 - 1  # float64 has integers up to here exactly


class OverwrittenCheck:
    """Compares what a step overwrites. Every rank makes it, and calls it alike."""

    def __init__(self) -> None:
        self._next = 0
        self._fastest = math.inf  # seconds of a digest: what one takes that is not interrupted

    def tell(self, facts: FactsMessage, step: int, tensors: Sequence[Tensor]) -> None:
        """Add a digest of `tensors`, as the step found them, to the facts of `step`, where it is
        due.
        """
        if tensors and step >= self._next:
            begin = perf_counter()
            found = digest(tensors) & _EXACT
            self._fastest = min(self._fastest, perf_counter() - begin)
            facts.add_digest(found, self._fastest)

    def differ(self, facts: Facts, step: int) -> bool:
        """Whether some rank began `step` with others. From the facts: the same answer on all
        ranks.
        """
        if step < self._next or not any(facts.digests_by_rank):
            return False
        digesting = max(facts.digesting_by_rank)
        # 0 in the first step
        seconds = max(map(sum, zip(facts.busy_by_rank, facts.waited_by_rank, strict=True)))
        if digesting > _FREE and seconds > 0:
            self._next = step + min(_RAREST, max(1, math.ceil(digesting / (_SHARE * seconds))))
        return len(set(facts.digests_by_rank)) > 1
