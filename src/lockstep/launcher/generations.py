"""A run that outlives its workers: a row of generations, each with a fixed number of them, from
checkpoint to checkpoint.

A worker that is killed, or one of whose loader's processes is, ends its generation. The next has
one fewer, not below the least that was asked for; it ends by itself at its next checkpoint, and the
one after that has them all again. An exception in Python begins no generation: in a deterministic
run it would come back.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

from lockstep.errors import UsageError
from lockstep.launcher.supervise import Outcome

RESTARTS = 3


@dataclass(frozen=True, slots=True)
class Workers:
    """How many there may be."""

    least: int
    most: int

    @classmethod
    def read(cls, text: str) -> Workers:
        """`4`, or `1:4`. Raises UsageError for anything else."""
        first, colon, last = text.partition(":")
        last = last if colon else first
        if first.isdigit() and last.isdigit() and 1 <= int(first) <= int(last):
            return cls(int(first), int(last))
        raise UsageError("not-a-range-of-workers", value=text)

    @property
    def elastic(self) -> bool:
        return self.least < self.most


def run_generations(
    start: Callable[[int], Outcome],
    workers: Workers,
    restarts: int,
    stopped_to_grow: Callable[[], bool],
    *,
    after_stalls: bool = False,
) -> Outcome:
    """Call `start(count)` for one generation after the other, and return how the last one ended.
    `after_stalls`: also after one that hung.

    `stopped_to_grow()` says whether a generation that ended well did so at a checkpoint, for more
    workers.
    """
    count, left = workers.most, restarts
    while True:
        outcome = start(count)
        if outcome.exit_code == 0 and stopped_to_grow():
            count = workers.most
            _say(f"going on with {_counted(count)} again")
            continue
        failure = outcome.failure
        if (
            failure is None
            or left == 0
            or not (failure.killed or (after_stalls and failure.kind == "stall"))
        ):
            return outcome
        left -= 1
        count = max(workers.least, count - 1)
        _say(
            f"going on with {_counted(count)} from the newest checkpoint (restart {restarts - left}"
            f" of {restarts})"
        )


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _counted(count: int) -> str:
    return f"{count} worker{'s' * (count > 1)}"
