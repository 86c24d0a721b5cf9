"""The clock chart of a pipeline: who does what when, worked out from the very order in which torch's schedule runs it.

    rank 0  F0 F1 F2 ·  ·  ·  B0--- B1--- B2---
    rank 1  ·  F0 F1 F2 B0--- B1--- B2--- ·  ·

All stages are equally long, messages take no time, and a backward takes `backward` forwards (twice the matrix products). The halves of a
backward, for the inputs and for the weights, are equally long. The unit of time is one stage's forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from lockstep.data.windows import counted
from lockstep.errors import UsageError
from lockstep.mesh.schedules import Schedule, Work

IDLE = "·"


@dataclass(frozen=True, slots=True)
class Placed:
    """A piece of work and its time, in forwards of a stage."""

    work: Work
    start: Fraction
    length: Fraction

    @property
    def stop(self) -> Fraction:
        return self.start + self.length


@dataclass(frozen=True, slots=True)
class Chart:
    """What each rank does when; between two pieces it waits."""

    schedule: Schedule
    micro_batches: int
    backward: Fraction
    rows: tuple[tuple[Placed, ...], ...]

    @property
    def ranks(self) -> int:
        return len(self.rows)

    @property
    def length(self) -> Fraction:
        """From the first forward to the last backward."""
        return max(row[-1].stop for row in self.rows)

    @property
    def bubble(self) -> float:
        """The fraction of all ranks' time in which they wait."""
        busy = sum(placed.length for row in self.rows for placed in row)
        return float(1 - busy / (self.length * self.ranks))

    @property
    def held(self) -> tuple[int, ...]:
        """For each rank: of how many forwards it holds activations at most, waiting for their backwards."""
        return tuple(_most_held([placed.work for placed in row]) for row in self.rows)


def chart(schedule: Schedule, ranks: int, micro_batches: int, backward: float = 2.0) -> Chart:
    """The chart of a step. Raises UsageError for numbers that the schedule cannot run, or a backward that takes no time."""
    if not 0 < backward < 1000:
        raise UsageError(f"backward={backward}: how many forwards a backward takes; give a number above 0, such as 2")
    length = Fraction(backward).limit_denominator(100)
    orders = schedule.order(ranks, micro_batches)
    return Chart(schedule, micro_batches, length, placed(orders, schedule.count(ranks), length))


def placed(orders: Sequence[Sequence[Work]], stages: int, backward: Fraction) -> tuple[tuple[Placed, ...], ...]:
    """Each piece as early as it can be: after what its rank did before, and after what it needs from other ranks."""
    rows: list[list[Placed]] = [[] for _ in orders]
    done: dict[Work, Fraction] = {}
    lengths = {"F": Fraction(1), "B": backward, "I": backward / 2, "W": backward / 2}
    moved = True
    while moved:
        moved = False
        for row, order in zip(rows, orders, strict=True):
            while len(row) < len(order):
                work = order[len(row)]
                needed = [done.get(each) for each in _needed(work, stages, done)]
                if None in needed:
                    break
                start = max([row[-1].stop if row else Fraction(0), *(each for each in needed if each is not None)])
                row.append(Placed(work, start, lengths[work.kind]))
                done[work] = row[-1].stop
                moved = True
    assert all(len(row) == len(order) for row, order in zip(rows, orders, strict=True)), "the ranks wait for each other for ever"
    return tuple(map(tuple, rows))


def _needed(work: Work, stages: int, done: dict[Work, Fraction]) -> list[Work]:
    """What must be done before: the stage before it for a forward, the stage after it for a backward, and what it continues."""
    stage, each = work.stage, work.micro_batch
    if work.kind == "F":
        return [Work("F", stage - 1, each)] if stage else []
    if work.kind == "W":
        return [Work("I", stage, each)]
    own = Work("F", stage, each)
    if stage == stages - 1:
        return [own]
    after = Work("I", stage + 1, each)
    return [own, after if after in done else Work("B", stage + 1, each)]


def _most_held(row: Sequence[Work]) -> int:
    now = most = 0
    for work in row:
        now += (work.kind == "F") - (work.kind in ("B", "W"))
        most = max(most, now)
    return most


def title(found: Chart) -> list[str]:
    """What is true of the chart as a whole, in lines: what runs, and how much of the time nothing does."""
    each = "" if found.schedule.per_rank == 1 else f", {found.schedule.per_rank} stages each"
    times = f"a backward takes {float(found.backward):g} forwards" if found.backward != 1 else "a backward takes as long as a forward"
    formula = found.schedule.bubble(found.ranks, found.micro_batches, float(found.backward))
    return [
        f"{found.schedule}: {counted(found.ranks, 'rank')}{each}, {counted(found.micro_batches, 'micro-batch', 'es')}; {times}",
        f"idle {found.bubble:.1%} of the time; {found.schedule.formula} = {formula:.1%}",
        f"activations held at most, by rank: {' '.join(map(str, found.held))}",
    ]


def text(found: Chart) -> str:
    """The picture, a row a rank."""
    parts = found.backward / 2 if any(placed.work.kind == "I" for row in found.rows for placed in row) else found.backward
    cell = Fraction(1, parts.limit_denominator(8).denominator)  # of time; the picture is to scale for lengths such as 1, 1.5, 2
    width = max(len(label(placed.work, found)) for row in found.rows for placed in row) + 1
    name = len(f"rank {found.ranks - 1}")
    rows = [f"{f'rank {rank}':<{name}}  {_row(row, found, cell, width)}" for rank, row in enumerate(found.rows)]
    return "\n".join([*title(found), "", *rows, "", legend(found)])


def label(work: Work, found: Chart) -> str:
    """F3: the forward of micro-batch 3; with several stages a rank F3a is its first stage's, F3b its second's."""
    which = "" if found.schedule.per_rank == 1 else chr(ord("a") + work.stage // found.ranks)
    return f"{work.kind}{work.micro_batch}{which}"


def legend(found: Chart) -> str:
    """What the letters mean."""
    kinds = {placed.work.kind for row in found.rows for placed in row}
    meanings = {"F": "forward", "B": "backward", "I": "backward for the inputs", "W": "for the weights"}
    several = "" if found.schedule.per_rank == 1 else "; a, b ... the rank's first, second ... stage"
    return f"{', '.join(f'{kind} {meaning}' for kind, meaning in meanings.items() if kind in kinds)} of a micro-batch{several}; {IDLE} idle"


def _row(row: Sequence[Placed], found: Chart, cell: Fraction, width: int) -> str:
    """Columns of `width` characters for `cell` of time each."""
    line, at = "", 0
    for each in row:
        start, stop = round(each.start / cell), round(each.stop / cell)
        line += f"{IDLE:<{width}}" * (start - at)
        line += label(each.work, found).ljust(width * (stop - start) - 1, "-") + " "
        at = stop
    return (line + f"{IDLE:<{width}}" * (round(found.length / cell) - at)).rstrip()
