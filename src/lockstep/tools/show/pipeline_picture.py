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
from itertools import chain

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
_LEFT = 72  # px: the left margin
_ROW = 30  # px: the height of a row
_GAP = 7  # px: between rows
# In px: the usual and the largest width of the chart.
_LONG = 430
_WIDEST = 1500
# In px: the largest, the usual smallest and the smallest width of a forward.
_UNIT = 40
_SMALL = 13
_NARROWEST = 9
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
        busy = sum(piece.length for piece in chain(*self.rows))
        total = self.length * self.ranks
        return float(1 - busy / total)

    @property
    def activations(self) -> tuple[int, ...]:
        """For each rank, the largest number of forwards whose activations it holds for their
        backwards.
        """
        return tuple(map(_most_activations, self.rows))


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
            for work in order[len(row) :]:
                needed = _needed(work, len(orders))
                if not done.keys() >= set(needed):
                    break
                free = row[-1].stop if row else Fraction(0)
                start = max([free, *(done[earlier] for earlier in needed)])
                piece = Placed(work, start, lengths[work.kind])
                row.append(piece)
                done[work] = piece.stop
                moved = True
    assert list(map(len, rows)) == list(map(len, orders)), "the ranks wait for each other for ever"
    return tuple(map(tuple, rows))


def _needed(work: StageWork, stages: int) -> list[StageWork]:
    """Return the work that `work` needs: for a forward the stage before, for a backward the stage
    after, and the forward of its own stage on the micro-batch.
    """
    stage = work.stage
    needed = []
    if work.kind == "B":
        needed.append(StageWork("F", stage, work.micro_batch))
        if stage < stages - 1:
            needed.append(StageWork("B", stage + 1, work.micro_batch))
    elif stage > 0:
        needed.append(StageWork("F", stage - 1, work.micro_batch))
    return needed


def _most_activations(row: Sequence[Placed]) -> int:
    count = 0
    most = 0
    for piece in row:
        count += 1 if piece.work.kind == "F" else -1
        most = max(most, count)
    return most


def title(chart: Chart) -> list[str]:
    """Describe the chart as a whole, in lines: the schedule, the idle time, and the activations
    that ranks hold.
    """
    length = f"{float(chart.backward):g} forwards"
    if chart.backward == 1:
        length = "as long as a forward"
    ranks = counted(chart.ranks, "rank")
    micro_batches = counted(chart.micro_batches, "micro-batch", "es")
    idle = schedules.bubble(chart.schedule, chart.ranks, chart.micro_batches)
    formula = schedules.formula(chart.schedule)
    return [
        f"{chart.schedule}: {ranks}, {micro_batches}; a backward takes {length}",
        f"idle {chart.bubble:.1%} of the time; {formula} = {idle:.1%}",
        f"activations held at most, by rank: {' '.join(map(str, chart.activations))}",
    ]


def text(chart: Chart) -> str:
    """Return the chart as text, one row per rank."""
    # `cell` is the time of a column of text. The chart is to scale for lengths such as 1, 1.5, 2.
    backward = chart.backward.limit_denominator(8)
    cell = Fraction(1, backward.denominator)
    labels = [label(piece.work) for piece in chain(*chart.rows)]
    width = max(map(len, labels)) + 1
    name_width = len(f"rank {chart.ranks - 1}")
    lines = [*title(chart), ""]
    for rank, row in enumerate(chart.rows):
        name = f"rank {rank}".ljust(name_width)
        lines.append(f"{name}  {_row(row, chart, cell, width)}")
    lines += ["", _LEGEND]
    return "\n".join(lines)


def label(work: StageWork) -> str:
    """Return a label: F3 is the forward of micro-batch 3."""
    return f"{work.kind}{work.micro_batch}"


def _row(row: Sequence[Placed], chart: Chart, cell: Fraction, width: int) -> str:
    """Return a rank's row. A column has `width` characters and lasts for `cell`."""
    idle = IDLE.ljust(width)
    line = ""
    end = 0
    for piece in row:
        start = round(piece.start / cell)
        line += idle * (start - end)
        end = round(piece.stop / cell)
        length = width * (end - start)
        line += label(piece.work).ljust(length - 1, "-") + " "
    line += idle * (round(chart.length / cell) - end)
    return line.rstrip()


def drawing(chart: Chart) -> Drawing:
    """Draw one row per rank, with time to the right and empty where a rank is idle. Raises
    UsageError for more than fits on a page.
    """
    length = float(chart.length)
    unit = min(_UNIT, max(_SMALL, _LONG / length), _WIDEST / length)
    if unit < _NARROWEST or chart.ranks > _RANKS:
        raise UsageError(
            "drawing-too-large",
            what=f"{chart.ranks} ranks and {length:g} forwards' time",
            most=f"{_RANKS} ranks and {_WIDEST // _NARROWEST} forwards' time",
        )
    lines = title(chart)
    sheet = Drawing(lines[0], ". ".join([*lines[1:], _LEGEND]) + ".")
    wrap = max(_LEFT + length * unit - MARGIN, 460)
    y = sheet.heading(lines, wrap=wrap) + 4
    for rank, row in enumerate(chart.rows):
        sheet.words(MARGIN, y + 20, f"rank {rank}", weight="bold")
        sheet.box(_LEFT, y, length * unit, _ROW, _IDLE[0], stroke="none")
        for piece in row:
            _draw(sheet, piece, y, unit)
        y += _ROW + _GAP
    meanings = {_MEANINGS[kind]: colour for kind, colour in _COLOURS.items()} | {"idle": _IDLE}
    y = sheet.legend(y + 8, meanings, wrap)
    sheet.note(y + 8, "Numbers are micro-batches", wrap)
    sheet.enlarge(700, most=1.4)
    return sheet


def _draw(sheet: Drawing, piece: Placed, top: float, unit: float) -> None:
    left = _LEFT + float(piece.start) * unit
    width = float(piece.length) * unit
    colour, tint = _COLOURS[piece.work.kind]
    sheet.box(left, top, width, _ROW, colour, tint=tint)
    number = str(piece.work.micro_batch)
    if width_of(number, 11) <= width:
        sheet.words(left + width / 2, top + 19, number, anchor="middle", size=11)
