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
from itertools import accumulate, chain

from lockstep.errors import UsageError
from lockstep.tools.drawing import CARD, MARGIN, TINT, Drawing, width_of
from lockstep.tools.timing.output_files import counted

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


Step = tuple[str, int, int]
"""A forward ("F") or a backward ("B"), a stage and a micro-batch."""


@dataclass(frozen=True, slots=True)
class Work:
    """A forward ("F") or a backward ("B") with its start and length, in forwards of a stage."""

    kind: str
    stage: int
    micro_batch: int
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
    rows: Sequence[Sequence[Work]]
    formula: str
    """The textbook's formula of the idle time, with its value."""

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
        busy = sum(work.length for work in chain(*self.rows))
        total = self.length * self.ranks
        return float(1 - busy / total)

    @property
    def activations(self) -> list[int]:
        """For each rank, the largest number of forwards whose activations it holds for their
        backwards.
        """
        return list(map(_most_activations, self.rows))


def placed(orders: Sequence[Sequence[Step]], backward: Fraction) -> list[list[Work]]:
    """Place each piece of work as early as possible: after its rank's earlier work, and after the
    work of other ranks that it needs.
    """
    rows: list[list[Work]] = [[] for _ in orders]
    done: dict[Step, Fraction] = {}
    lengths = {"F": Fraction(1), "B": backward}
    moved = True
    while moved:
        moved = False
        for row, order in zip(rows, orders, strict=True):
            for step in order[len(row) :]:
                needed = _needed(*step, len(orders))
                if not done.keys() >= set(needed):
                    break
                free = row[-1].stop if row else Fraction(0)
                start = max([free, *(done[earlier] for earlier in needed)])
                row.append(Work(*step, start, lengths[step[0]]))
                done[step] = row[-1].stop
                moved = True
    assert list(map(len, rows)) == list(map(len, orders)), "the ranks wait for each other for ever"
    return rows


def _needed(kind: str, stage: int, micro_batch: int, stages: int) -> list[Step]:
    """Return the work that a piece of work needs: for a forward the stage before, for a backward
    the stage after, and the forward of its own stage on the micro-batch.
    """
    if kind == "F":
        return [("F", stage - 1, micro_batch)] if stage else []
    after = [("B", stage + 1, micro_batch)] if stage < stages - 1 else []
    return [("F", stage, micro_batch), *after]


def _most_activations(row: Sequence[Work]) -> int:
    changes = [1 if work.kind == "F" else -1 for work in row]
    return max(accumulate(changes))


def title(chart: Chart) -> list[str]:
    """Describe the chart as a whole, in lines: the schedule, the idle time, and the activations
    that ranks hold.
    """
    length = f"{float(chart.backward):g} forwards"
    if chart.backward == 1:
        length = "as long as a forward"
    ranks = counted(chart.ranks, "rank")
    micro_batches = counted(chart.micro_batches, "micro-batch", "es")
    return [
        f"{chart.schedule}: {ranks}, {micro_batches}; a backward takes {length}",
        f"idle {chart.bubble:.1%} of the time; {chart.formula}",
        f"activations held at most, by rank: {' '.join(map(str, chart.activations))}",
    ]


def text(chart: Chart) -> str:
    """Return the chart as text, one row per rank."""
    # `cell` is the time of a column of text. The chart is to scale for lengths such as 1, 1.5, 2.
    backward = chart.backward.limit_denominator(8)
    cell = Fraction(1, backward.denominator)
    labels = [label(work) for work in chain(*chart.rows)]
    width = max(map(len, labels)) + 1
    name_width = len(f"rank {chart.ranks - 1}")
    lines = [*title(chart), ""]
    for rank, row in enumerate(chart.rows):
        name = f"rank {rank}".ljust(name_width)
        lines.append(f"{name}  {_row(row, chart, cell, width)}")
    lines += ["", _LEGEND]
    return "\n".join(lines)


def label(work: Work) -> str:
    """Return a label: F3 is the forward of micro-batch 3."""
    return f"{work.kind}{work.micro_batch}"


def _row(row: Sequence[Work], chart: Chart, cell: Fraction, width: int) -> str:
    """Return a rank's row. A column has `width` characters and lasts for `cell`."""
    idle = IDLE.ljust(width)
    line = ""
    end = 0
    for work in row:
        start = round(work.start / cell)
        line += idle * (start - end)
        end = round(work.stop / cell)
        length = width * (end - start)
        line += label(work).ljust(length - 1, "-") + " "
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
        for work in row:
            _draw(sheet, work, y, unit)
        y += _ROW + _GAP
    meanings = {_MEANINGS[kind]: colour for kind, colour in _COLOURS.items()} | {"idle": _IDLE}
    y = sheet.legend(y + 8, meanings, wrap)
    sheet.note(y + 8, "Numbers are micro-batches", wrap)
    sheet.enlarge(700, most=1.4)
    return sheet


def _draw(sheet: Drawing, work: Work, top: float, unit: float) -> None:
    left = _LEFT + float(work.start) * unit
    width = float(work.length) * unit
    colour, tint = _COLOURS[work.kind]
    sheet.box(left, top, width, _ROW, colour, tint=tint)
    number = str(work.micro_batch)
    if width_of(number, 11) <= width:
        sheet.words(left + width / 2, top + 19, number, anchor="middle", size=11)
