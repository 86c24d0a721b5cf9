"""The clock chart of a pipeline, as text and as a drawing: who does what when, worked out from the
very order in which torch's schedule runs it.

    rank 0  F0 F1 F2 ·  ·  ·  B0--- B1--- B2---
    rank 1  ·  F0 F1 F2 B0--- B1--- B2--- ·  ·

All stages are equally long, messages take no time, and a backward takes `backward` forwards (twice
the matrix products). The halves of a backward, for the inputs and for the weights, are equally
long. The unit of time is one stage's forward.
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
# In px: left of the first row, a row's height, between two.
_LEFT, _ROW, _GAP = 72, 30, 7
# In px: of the chart, usually and at most; most, usually least and least of a forward.
_LONG, _WIDEST, _UNIT, _SMALL, _NARROWEST = 430, 1500, 40, 13, 9
_RANKS = 32


@dataclass(frozen=True, slots=True)
class Placed:
    """A piece of work and its time, in forwards of a stage."""

    work: StageWork
    start: Fraction
    length: Fraction

    @property
    def stop(self) -> Fraction:
        return self.start + self.length


@dataclass(frozen=True, slots=True)
class Chart:
    """What each rank does when; between two pieces it waits."""

    schedule: PipelineSchedule
    micro_batches: int
    backward: Fraction
    rows: tuple[tuple[Placed, ...], ...]

    @property
    def ranks(self) -> int:
        return len(self.rows)

    @property
    def kinds(self) -> list[str]:
        """Of the work that there is."""
        every = {placed.work.kind for row in self.rows for placed in row}
        return [kind for kind in _MEANINGS if kind in every]

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
        """For each rank: of how many forwards it holds activations at most, waiting for their
        backwards.
        """
        return tuple(_most_held([placed.work for placed in row]) for row in self.rows)


def chart(
    schedule: PipelineSchedule, ranks: int, micro_batches: int, backward: float = 2.0
) -> Chart:
    """The chart of a step. Raises UsageError for numbers that the schedule cannot run, or a
    backward that takes no time.
    """
    knob.number("backward", backward, above=0, below=1000, unit="forwards")
    length = Fraction(backward).limit_denominator(100)
    orders = schedule.order(ranks, micro_batches)
    return Chart(schedule, micro_batches, length, placed(orders, schedule.count(ranks), length))


def placed(
    orders: Sequence[Sequence[StageWork]], stages: int, backward: Fraction
) -> tuple[tuple[Placed, ...], ...]:
    """Each piece as early as it can be: after what its rank did before, and after what it needs
    from other ranks.
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
    """What must be done before: the stage before it for a forward, the stage after it for a
    backward, and what it continues.
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
    """What is true of the chart as a whole, in lines: what runs, and how much of the time
    nothing does.
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
    """The picture, a row a rank."""
    parts = found.backward / 2 if "I" in found.kinds else found.backward
    # A column of the text. The picture is to scale for lengths such as 1, 1.5, 2.
    cell = Fraction(1, parts.limit_denominator(8).denominator)
    width = max(len(label(placed.work, found)) for row in found.rows for placed in row) + 1
    name = len(f"rank {found.ranks - 1}")
    rows = [
        f"{f'rank {rank}':<{name}}  {_row(row, found, cell, width)}"
        for rank, row in enumerate(found.rows)
    ]
    return "\n".join([*title(found), "", *rows, "", legend(found)])


def label(work: StageWork, found: Chart) -> str:
    """F3: the forward of micro-batch 3; with several stages a rank F3a is its first stage's, F3b
    its second's.
    """
    which = "" if found.schedule.per_rank == 1 else chr(ord("a") + work.stage // found.ranks)
    return f"{work.kind}{work.micro_batch}{which}"


def legend(found: Chart) -> str:
    """What the letters mean."""
    several = (
        "" if found.schedule.per_rank == 1 else "; a, b ... the rank's first, second ... stage"
    )
    meanings = ", ".join(f"{kind} {_MEANINGS[kind]}" for kind in found.kinds)
    return f"{meanings} of a micro-batch{several}; {IDLE} idle"


def _row(row: Sequence[Placed], found: Chart, cell: Fraction, width: int) -> str:
    """Columns of `width` characters for `cell` of time each."""
    line, at = "", 0
    for each in row:
        start, stop = round(each.start / cell), round(each.stop / cell)
        line += f"{IDLE:<{width}}" * (start - at)
        line += label(each.work, found).ljust(width * (stop - start) - 1, "-") + " "
        at = stop
    return (line + f"{IDLE:<{width}}" * (round(found.length / cell) - at)).rstrip()


def drawing(found: Chart) -> Drawing:
    """A row a rank, time to the right, empty where a rank waits. Raises UsageError for more than
    fits on a page.
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
    """And its strength: the later a rank's stage, the stronger."""
    return f"var(--{_COLOURS[kind]})", TINT + 0.2 * which / max(1, found.schedule.per_rank - 1)
