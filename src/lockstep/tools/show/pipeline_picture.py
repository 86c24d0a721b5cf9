"""Show the time chart of a pipeline as text and as a drawing: which rank does what when. The order
of the work is the order in which torch's schedule runs it.

    rank 0  F0 F1 F2 ·  ·  ·  B0--- B1--- B2---
    rank 1  ·  F0 F1 F2 B0--- B1--- B2--- ·  ·

The unit of time is one stage's forward. All stages take equally long, messages take no time, and a
backward takes `backward` units (default 2: twice the matrix products). The two halves of a
backward, for the inputs and for the weights, take equally long.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from lockstep.config import knob
from lockstep.config.pipeline_schedules import PipelineSchedule, StageWork
from lockstep.data.windows import counted
from lockstep.errors import UsageError
from lockstep.tools.drawing import CARD, MARGIN, TINT, Drawing, width_of

IDLE = "·"
_MEANINGS = {
    "F": "forward",
    "B": "backward",
    "I": "backward for the inputs",
    "W": "backward for the weights",
}
_COLOURS = {"F": "blue", "B": "green", "I": "green", "W": "gold"}
_IDLE = (CARD, 1.0)
# In px: the left margin, the height of a row, the gap between rows.
_LEFT, _ROW, _GAP = 72, 30, 7
# In px: the usual and the largest width of the chart; the largest, the usual smallest and the
# smallest width of a forward.
_LONG, _WIDEST, _UNIT, _SMALL, _NARROWEST = 430, 1500, 40, 13, 9
_RANKS = 32


@dataclass(frozen=True, slots=True)
class Placed:
    """A piece of work with its start and length, in forwards of a stage."""

    work: StageWork
    start: Fraction
    length: Fraction

    @property
    def stop(self) -> Fraction:
        return self.start + self.length


@dataclass(frozen=True, slots=True)
class Chart:
    """The work of each rank with its times. Between two pieces of work the rank is idle."""

    schedule: PipelineSchedule
    micro_batches: int
    backward: Fraction
    rows: tuple[tuple[Placed, ...], ...]

    @property
    def ranks(self) -> int:
        return len(self.rows)

    @property
    def kinds(self) -> list[str]:
        """The kinds of work that occur in the chart."""
        every = {placed.work.kind for row in self.rows for placed in row}
        return [kind for kind in _MEANINGS if kind in every]

    @property
    def length(self) -> Fraction:
        """The time from the first forward to the last backward."""
        return max(row[-1].stop for row in self.rows)

    @property
    def bubble(self) -> float:
        """The fraction of all ranks' time in which they are idle."""
        busy = sum(placed.length for row in self.rows for placed in row)
        return float(1 - busy / (self.length * self.ranks))

    @property
    def held(self) -> tuple[int, ...]:
        """For each rank, the largest number of forwards whose activations it holds for their
        backwards.
        """
        return tuple(_most_held([placed.work for placed in row]) for row in self.rows)


def chart(
    schedule: PipelineSchedule, ranks: int, micro_batches: int, backward: float = 2.0
) -> Chart:
    """Return the chart of a step. Raises UsageError for numbers that the schedule cannot run, or
    for a `backward` outside its range.
    """
    knob.number("backward", backward, above=0, below=1000, unit="forwards")
    length = Fraction(backward).limit_denominator(100)
    orders = schedule.order(ranks, micro_batches)
    return Chart(schedule, micro_batches, length, placed(orders, schedule.count(ranks), length))


def placed(
    orders: Sequence[Sequence[StageWork]], stages: int, backward: Fraction
) -> tuple[tuple[Placed, ...], ...]:
    """Place each piece of work as early as possible: after its rank's earlier work, and after the
    work of other ranks that it needs.
    """
    rows: list[list[Placed]] = [[] for _ in orders]
    done: dict[StageWork, Fraction] = {}
    lengths = {"F": Fraction(1), "B": backward, "I": backward / 2, "W": backward / 2}
    moved = True
    while moved:
        moved = False
        for row, order in zip(rows, orders, strict=True):
            while len(row) < len(order):
                work = order[len(row)]
                needed = _needed(work, stages, done)
                if any(each not in done for each in needed):
                    break
                free = row[-1].stop if row else Fraction(0)
                start = max(free, *(done[each] for each in needed), Fraction(0))
                row.append(Placed(work, start, lengths[work.kind]))
                done[work] = row[-1].stop
                moved = True
    assert list(map(len, rows)) == list(map(len, orders)), "the ranks wait for each other for ever"
    return tuple(map(tuple, rows))


def _needed(work: StageWork, stages: int, done: dict[StageWork, Fraction]) -> list[StageWork]:
    """Return the work that `work` needs: for a forward the stage before, for a backward the stage
    after, and the earlier work of its own stage on the micro-batch.
    """
    stage, each = work.stage, work.micro_batch
    if work.kind == "F":
        return [StageWork("F", stage - 1, each)] if stage else []
    if work.kind == "W":
        return [StageWork("I", stage, each)]
    own = StageWork("F", stage, each)
    if stage == stages - 1:
        return [own]
    after = StageWork("I", stage + 1, each)
    return [own, after if after in done else StageWork("B", stage + 1, each)]


def _most_held(row: Sequence[StageWork]) -> int:
    now = most = 0
    for work in row:
        now += (work.kind == "F") - (work.kind in ("B", "W"))
        most = max(most, now)
    return most


def title(found: Chart) -> list[str]:
    """Describe the chart as a whole, in lines: the schedule, the idle time, and the activations
    that ranks hold.
    """
    each = "" if found.schedule.per_rank == 1 else f", {found.schedule.per_rank} stages each"
    length = (
        "as long as a forward" if found.backward == 1 else f"{float(found.backward):g} forwards"
    )
    formula = found.schedule.bubble(found.ranks, found.micro_batches, float(found.backward))
    return [
        (
            f"{found.schedule}: {counted(found.ranks, 'rank')}{each},"
            f" {counted(found.micro_batches, 'micro-batch', 'es')}; a backward takes {length}"
        ),
        f"idle {found.bubble:.1%} of the time; {found.schedule.formula} = {formula:.1%}",
        f"activations held at most, by rank: {' '.join(map(str, found.held))}",
    ]


def text(found: Chart) -> str:
    """Return the chart as text, one row per rank."""
    parts = found.backward / 2 if "I" in found.kinds else found.backward
    # `cell` is the time of a column of text. The chart is to scale for lengths such as 1, 1.5, 2.
    cell = Fraction(1, parts.limit_denominator(8).denominator)
    width = max(len(label(placed.work, found)) for row in found.rows for placed in row) + 1
    name = len(f"rank {found.ranks - 1}")
    rows = [
        f"{f'rank {rank}':<{name}}  {_row(row, found, cell, width)}"
        for rank, row in enumerate(found.rows)
    ]
    return "\n".join([*title(found), "", *rows, "", legend(found)])


def label(work: StageWork, found: Chart) -> str:
    """Return a label: F3 is the forward of micro-batch 3. If a rank has several stages, F3a is in
    its first stage and F3b in its second.
    """
    which = "" if found.schedule.per_rank == 1 else chr(ord("a") + work.stage // found.ranks)
    return f"{work.kind}{work.micro_batch}{which}"


def legend(found: Chart) -> str:
    """Explain the letters of the chart."""
    several = (
        "" if found.schedule.per_rank == 1 else "; a, b ... the rank's first, second ... stage"
    )
    meanings = ", ".join(f"{kind} {_MEANINGS[kind]}" for kind in found.kinds)
    return f"{meanings} of a micro-batch{several}; {IDLE} idle"


def _row(row: Sequence[Placed], found: Chart, cell: Fraction, width: int) -> str:
    """Return a rank's row. A column has `width` characters and lasts for `cell`."""
    line, at = "", 0
    for each in row:
        start, stop = round(each.start / cell), round(each.stop / cell)
        line += f"{IDLE:<{width}}" * (start - at)
        line += label(each.work, found).ljust(width * (stop - start) - 1, "-") + " "
        at = stop
    return (line + f"{IDLE:<{width}}" * (round(found.length / cell) - at)).rstrip()


def drawing(found: Chart) -> Drawing:
    """Draw one row per rank, with time to the right and empty where a rank is idle. Raises
    UsageError for more than fits on a page.
    """
    length = float(found.length)
    unit = min(_UNIT, max(_SMALL, _LONG / length), _WIDEST / length)
    if unit < _NARROWEST or found.ranks > _RANKS:
        raise UsageError(
            "drawing-too-large",
            what=f"{found.ranks} ranks and {length:g} forwards' time",
            most=f"{_RANKS} ranks and {_WIDEST // _NARROWEST} forwards' time",
        )
    lines = title(found)
    sheet = Drawing(lines[0], ". ".join([*lines[1:], legend(found)]) + ".")
    wrap = max(_LEFT + length * unit - MARGIN, 460)
    y = sheet.heading(lines, wrap=wrap) + 4
    for rank, row in enumerate(found.rows):
        top = y + rank * (_ROW + _GAP)
        sheet.words(MARGIN, top + 20, f"rank {rank}", weight="bold")
        sheet.box(_LEFT, top, length * unit, _ROW, _IDLE[0], stroke="none")
        for each in row:
            _draw(sheet, found, each, top, unit)
    meanings = {_MEANINGS[kind]: _colour(found, kind, 0) for kind in found.kinds} | {"idle": _IDLE}
    y = sheet.legend(y + found.ranks * (_ROW + _GAP) + 8, meanings, wrap)
    several = "; the stronger the colour, the later of the rank's stages" * (
        found.schedule.per_rank > 1
    )
    sheet.note(y + 8, f"Numbers are micro-batches{several}", wrap)
    sheet.zoom = max(1.0, min(1.4, 700 / sheet.width))
    return sheet


def _draw(sheet: Drawing, found: Chart, each: Placed, top: float, unit: float) -> None:
    left, width = _LEFT + float(each.start) * unit, float(each.length) * unit
    colour, tint = _colour(found, each.work.kind, each.work.stage // found.ranks)
    sheet.box(left, top, width, _ROW, colour, tint=tint)
    inside = label(each.work, found)[1:]
    if width_of(inside, 11) <= width:
        sheet.words(left + width / 2, top + 19, inside, anchor="middle", size=11)


def _colour(found: Chart, kind: str, which: int) -> tuple[str, float]:
    """Return a colour and its strength; it is stronger for a later stage of the rank."""
    return f"var(--{_COLOURS[kind]})", TINT + 0.2 * which / max(1, found.schedule.per_rank - 1)
