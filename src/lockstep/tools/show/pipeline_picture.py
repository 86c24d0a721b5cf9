"""Show the time chart of a pipeline as text and as a drawing: which rank does what when. The order
of the work is the order in which torch's schedule runs it.

    rank 0  F0 F1 F2 ·  ·  ·  B0--- B1--- B2---
    rank 1  ·  F0 F1 F2 B0--- B1--- B2--- ·  ·

The unit of time is one stage's forward. All stages take equally long, messages take no time, and a
backward takes `backward` units (default 2: twice the matrix products).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from lockstep.config import knob
from lockstep.data.windows import counted
from lockstep.errors import UsageError
from lockstep.model_parallel import schedules
from lockstep.model_parallel.schedules import StageWork
from lockstep.tools.drawing import CARD, MARGIN, TINT, Drawing, width_of

IDLE = "·"
_MEANINGS = {"F": "forward", "B": "backward"}
_LEGEND = f"F forward, B backward of a micro-batch; {IDLE} idle"
_COLOURS = {"F": ("var(--blue)", TINT), "B": ("var(--green)", TINT)}
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

    schedule: str
    micro_batches: int
    backward: Fraction
    rows: tuple[tuple[Placed, ...], ...]

    @property
    def ranks(self) -> int:
        return len(self.rows)

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


def chart(schedule: str, ranks: int, micro_batches: int, backward: float = 2.0) -> Chart:
    """Return the chart of a step. Raises UsageError for numbers that the schedule cannot run, or
    for a `backward` outside its range.
    """
    knob.number("backward", backward, above=0, below=1000, unit="forwards")
    length = Fraction(backward).limit_denominator(100)
    orders = schedules.order(schedule, ranks, micro_batches)
    return Chart(schedule, micro_batches, length, placed(orders, length))


def placed(
    orders: Sequence[Sequence[StageWork]], backward: Fraction
) -> tuple[tuple[Placed, ...], ...]:
    """Place each piece of work as early as possible: after its rank's earlier work, and after the
    work of other ranks that it needs.
    """
    rows: list[list[Placed]] = [[] for _ in orders]
    done: dict[StageWork, Fraction] = {}
    lengths = {"F": Fraction(1), "B": backward}
    moved = True
    while moved:
        moved = False
        for row, order in zip(rows, orders, strict=True):
            while len(row) < len(order):
                work = order[len(row)]
                needed = _needed(work, len(orders))
                if any(each not in done for each in needed):
                    break
                free = row[-1].stop if row else Fraction(0)
                start = max(free, *(done[each] for each in needed), Fraction(0))
                row.append(Placed(work, start, lengths[work.kind]))
                done[work] = row[-1].stop
                moved = True
    assert list(map(len, rows)) == list(map(len, orders)), "the ranks wait for each other for ever"
    return tuple(map(tuple, rows))


def _needed(work: StageWork, stages: int) -> list[StageWork]:
    """Return the work that `work` needs: for a forward the stage before, for a backward the stage
    after, and the forward of its own stage on the micro-batch.
    """
    stage, number = work.stage, work.micro_batch
    if work.kind == "F":
        return [StageWork("F", stage - 1, number)] if stage else []
    own = StageWork("F", stage, number)
    return [own] if stage == stages - 1 else [own, StageWork("B", stage + 1, number)]


def _most_held(row: Sequence[StageWork]) -> int:
    now = most = 0
    for work in row:
        now += 1 if work.kind == "F" else -1
        most = max(most, now)
    return most


def title(found: Chart) -> list[str]:
    """Describe the chart as a whole, in lines: the schedule, the idle time, and the activations
    that ranks hold.
    """
    length = (
        "as long as a forward" if found.backward == 1 else f"{float(found.backward):g} forwards"
    )
    idle = schedules.bubble(found.schedule, found.ranks, found.micro_batches)
    formula = schedules.formula(found.schedule)
    return [
        (
            f"{found.schedule}: {counted(found.ranks, 'rank')},"
            f" {counted(found.micro_batches, 'micro-batch', 'es')}; a backward takes {length}"
        ),
        f"idle {found.bubble:.1%} of the time; {formula} = {idle:.1%}",
        f"activations held at most, by rank: {' '.join(map(str, found.held))}",
    ]


def text(found: Chart) -> str:
    """Return the chart as text, one row per rank."""
    # `cell` is the time of a column of text. The chart is to scale for lengths such as 1, 1.5, 2.
    cell = Fraction(1, found.backward.limit_denominator(8).denominator)
    width = max(len(label(placed.work)) for row in found.rows for placed in row) + 1
    name = len(f"rank {found.ranks - 1}")
    rows = [
        f"{f'rank {rank}':<{name}}  {_row(row, found, cell, width)}"
        for rank, row in enumerate(found.rows)
    ]
    return "\n".join([*title(found), "", *rows, "", _LEGEND])


def label(work: StageWork) -> str:
    """Return a label: F3 is the forward of micro-batch 3."""
    return f"{work.kind}{work.micro_batch}"


def _row(row: Sequence[Placed], found: Chart, cell: Fraction, width: int) -> str:
    """Return a rank's row. A column has `width` characters and lasts for `cell`."""
    line, at = "", 0
    for each in row:
        start, stop = round(each.start / cell), round(each.stop / cell)
        line += f"{IDLE:<{width}}" * (start - at)
        line += label(each.work).ljust(width * (stop - start) - 1, "-") + " "
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
    sheet = Drawing(lines[0], ". ".join([*lines[1:], _LEGEND]) + ".")
    wrap = max(_LEFT + length * unit - MARGIN, 460)
    y = sheet.heading(lines, wrap=wrap) + 4
    for rank, row in enumerate(found.rows):
        top = y + rank * (_ROW + _GAP)
        sheet.words(MARGIN, top + 20, f"rank {rank}", weight="bold")
        sheet.box(_LEFT, top, length * unit, _ROW, _IDLE[0], stroke="none")
        for each in row:
            _draw(sheet, each, top, unit)
    meanings = {_MEANINGS[kind]: colour for kind, colour in _COLOURS.items()} | {"idle": _IDLE}
    y = sheet.legend(y + found.ranks * (_ROW + _GAP) + 8, meanings, wrap)
    sheet.note(y + 8, "Numbers are micro-batches", wrap)
    sheet.zoom = max(1.0, min(1.4, 700 / sheet.width))
    return sheet


def _draw(sheet: Drawing, each: Placed, top: float, unit: float) -> None:
    left, width = _LEFT + float(each.start) * unit, float(each.length) * unit
    colour, tint = _COLOURS[each.work.kind]
    sheet.box(left, top, width, _ROW, colour, tint=tint)
    inside = label(each.work)[1:]
    if width_of(inside, 11) <= width:
        sheet.words(left + width / 2, top + 19, inside, anchor="middle", size=11)
