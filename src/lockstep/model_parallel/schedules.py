"""Pipeline schedules: the order in which ranks run the forwards and backwards of their stage. Torch's
schedules run in these orders (model_parallel/pipeline.py). This file does not import torch.

    naive          one micro-batch after the other, one rank active at a time: a simple reference
    gpipe          all forwards, then all backwards (Huang et al., 2019)
    1f1b           as gpipe, but each backward as early as possible: the same bubbles, fewer
                   activations in memory (PipeDream-Flush)

Stage s is on rank s of the pipeline.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from lockstep.config import knob
from lockstep.config.mesh import Schedule
from lockstep.errors import UsageError

Kind = Literal["F", "B"]
"""F: forward, B: backward."""
NAMES: tuple[Schedule, ...] = get_args(Schedule)


@dataclass(frozen=True, slots=True)
class StageWork:
    """One forward or backward that a rank runs."""

    kind: Kind
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"


def fits(schedule: str, ranks: int, micro_batches: int) -> bool:
    """Whether this number of micro-batches can run in this order. In gpipe's order any can."""
    return schedule != "1f1b" or micro_batches >= ranks


def check(schedule: str, ranks: int, micro_batches: int) -> None:
    """Raise a UsageError for an unknown schedule, or for numbers that it cannot run."""
    knob.chosen("schedule", schedule, NAMES)
    if ranks < 1 or micro_batches < 1:
        raise UsageError("empty-pipeline", ranks=ranks, micro_batches=micro_batches)
    if not fits(schedule, ranks, micro_batches):
        raise UsageError(
            "schedule-does-not-fit", schedule=schedule, ranks=ranks, micro_batches=micro_batches
        )


def order(schedule: str, ranks: int, micro_batches: int) -> list[list[StageWork]]:
    """Return the work of every rank, in order. Raises UsageError like `check`.

    Example: `order("1f1b", 2, 3)` is 0F0 0F1 0B0 0F2 0B1 0B2 and 1F0 1B0 1F1 1B1 1F2 1B2.
    """
    check(schedule, ranks, micro_batches)
    orders = []
    for rank in range(ranks):
        # a rank runs this many forwards; then, in turns, one backward and one forward
        ahead = {"naive": 1, "gpipe": micro_batches, "1f1b": ranks - rank}[schedule]
        forwards = [StageWork("F", rank, number) for number in range(micro_batches)]
        work = forwards[:ahead]
        for number in range(micro_batches):
            work.append(StageWork("B", rank, number))
            work += forwards[ahead + number : ahead + number + 1]
        orders.append(work)
    return orders


def bubble(schedule: str, ranks: int, micro_batches: int) -> float:
    """Return the fraction of a step in which a rank idles, by the textbook formula. It assumes
    equal stages and free messages. How long a backward takes does not matter.
    """
    works = 1 if schedule == "naive" else micro_batches
    return (ranks - 1) / (works + ranks - 1)


def formula(schedule: str) -> str:
    """Return the formula of `bubble` as text, for p ranks and m micro-batches."""
    if schedule == "naive":
        return "(p-1)/p"
    return "(p-1)/(m+p-1)"
