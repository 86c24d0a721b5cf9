"""Show a schedule as text and as a drawing: which rank sends what to which rank in each round, and
what each rank holds after it.

    round 1  0 -> 1 a   1 -> 2 b   2 -> 3 c   3 -> 0 d    add
             rank 0   a 0     b 0     c 0     d 03

A letter is a cell; the digits after it are the ranks whose values it contains. A `*` marks a
complete cell. The rounds are those of the schedule that a collective runs.

In the drawing a column is a rank and a row is a round. A box is a cell; its colour is stronger the
more ranks it contains. An arrow is a message.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lockstep.collectives.schedule import REDUCING, Schedule, Transfer, held_before
from lockstep.data.windows import counted
from lockstep.errors import UsageError
from lockstep.schedules.prove import Proof, prove
from lockstep.tools.drawing import (
    ARROW,
    CARD,
    FAINT,
    MARGIN,
    SOFT,
    TINT,
    Drawing,
    width_of,
)

SHOWN = 16
"""The largest number of ranks whose contents are written out."""
_MEANINGS = {
    "some ranks are counted": ("var(--blue)", TINT),
    "complete: all ranks are counted": ("var(--green)", 0.3),
}
_LEGEND = (
    "A box is a cell, with the ranks that are counted in it. An arrow is a message; an orange edge"
    " marks what it has changed"
)
# In px: the left margin, the gap between columns, the height of a box, the gap between rows, and
# the width of a line of text.
_LEFT, _BETWEEN, _BOX, _GAP, _WRAP = 74, 30, 20, 46, 450


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One round of a schedule, and what each rank holds after it: `held[rank][cell]` are the ranks
    whose values the cell contains.
    """

    number: int
    transfers: Sequence[Transfer]
    held: Sequence[dict[int, frozenset[int]]]

    @property
    def how(self) -> str:
        """Whether receivers add or replace cells: the same in all transfers of a round."""
        kinds = {transfer.reduce for transfer in self.transfers}
        assert len(kinds) == 1, "a round adds or replaces"
        return "add" if kinds == {True} else "replace"


def rounds(schedule: Schedule) -> Iterator[Snapshot]:
    """Yield a snapshot of each round. Round 0 is what each rank holds at the start."""
    held = [
        {
            cell: frozenset({rank})
            for cell in held_before(
                schedule.kind, schedule.world, rank, schedule.root, schedule.cells
            )
        }
        for rank in range(schedule.world)
    ]
    yield Snapshot(0, (), [dict(each) for each in held])
    for number, transfers in enumerate(schedule.transfers(), start=1):
        sent = [
            {cell: held[transfer.src][cell] for cell in transfer.cells} for transfer in transfers
        ]
        for transfer, content in zip(transfers, sent, strict=True):
            for cell, ranks in content.items():
                held[transfer.dst][cell] = (
                    held[transfer.dst][cell] | ranks if transfer.reduce else ranks
                )
        yield Snapshot(number, transfers, [dict(each) for each in held])


def letter(cell: int) -> str:
    """Return a cell's name: a .. z, then a1 .. z1, and so on."""
    return "abcdefghijklmnopqrstuvwxyz"[cell % 26] + (str(cell // 26) if cell >= 26 else "")


def complete(schedule: Schedule, cell: int, ranks: frozenset[int]) -> bool:
    """Whether a cell contains the values of all ranks that it must contain."""
    return len(ranks) == schedule.world if schedule.kind in REDUCING else True


def title(schedule: Schedule, proof: Proof) -> list[str]:
    """Describe the schedule as a whole, in lines."""
    name = schedule.name.replace("_", "-")
    count = f"{counted(proof.rounds, 'round')}, {counted(proof.messages, 'message')} in all"
    lines = [
        f"{name} {schedule.kind.replace('_', '-')}, {counted(schedule.world, 'rank')}: {count}"
    ]
    sent = [
        str(cells) if schedule.cells == 1 else f"{cells}/{schedule.cells}"
        for cells in sorted(set(proof.cells_sent_by))
    ]
    share = " to ".join([sent[0], sent[-1]] if len(sent) > 1 else sent)
    lines.append(f"each rank sends {share} {'times' if schedule.cells == 1 else 'of'} the tensor")
    if schedule.kind in REDUCING:
        order = proof.orders.get(0, "") if schedule.world <= SHOWN else ""
        same = "the same bits on all ranks" if proof.same_bits else "other bits on some ranks"
        lines.append(f"cell a is added as {order}, {same}" if order else same)
    return lines


def text(schedule: Schedule) -> str:
    """Return the whole picture as text. Beyond 16 ranks it says that contents are left out."""
    lines = title(schedule, prove(schedule))
    shown = schedule.world <= SHOWN
    if not shown:
        lines.append(f"contents are written out for up to {SHOWN} ranks")
    width = len(f"round {len(schedule)}")
    for snapshot in rounds(schedule):
        if snapshot.number == 0:
            lines += ["", "start"] if shown else [""]
        else:
            lines.append(
                f"{f'round {snapshot.number}':<{width}}  {'   '.join(map(_message, snapshot.transfers))}   "
                f" {snapshot.how}"
            )
        if shown:
            lines += _contents(schedule, snapshot)
    return "\n".join(lines)


def _message(transfer: Transfer) -> str:
    cells = [letter(cell) for cell in transfer.cells]
    return (
        f"{transfer.src} -> {transfer.dst}"
        f" {''.join(cells) if len(cells) <= 8 else f'{cells[0]}..{cells[-1]}'}"
    )


def _contents(schedule: Schedule, snapshot: Snapshot) -> list[str]:
    rows = []
    cells = range(schedule.cells)
    if schedule.kind == "all_to_all":  # its world x world cells fit for up to 4 ranks
        cells = range(schedule.cells) if schedule.world <= 4 else range(0)
    for rank, held in enumerate(snapshot.held):
        parts = [_cell(schedule, cell, held.get(cell)) for cell in cells]
        rows.append(f"    rank {rank:<2} {'  '.join(parts)}".rstrip())
    return rows if cells else []


def _cell(schedule: Schedule, cell: int, ranks: frozenset[int] | None) -> str:
    room = schedule.world if schedule.kind in REDUCING else 1
    mark = " "
    if ranks is None:
        inside = "."
    else:
        inside = ("" if schedule.world <= 10 else ",").join(map(str, sorted(ranks)))
        mark = "*" if schedule.kind in REDUCING and complete(schedule, cell, ranks) else " "
    return f"{letter(cell)} {inside:<{room}}{mark}"


def drawing(schedule: Schedule) -> Drawing:
    """Draw one column per rank and one row per round. Raises UsageError for more ranks or cells
    than fit on a page.
    """
    if schedule.world > SHOWN or schedule.cells > SHOWN:
        raise UsageError(
            "drawing-too-large",
            what=f"{schedule.world} ranks with {schedule.cells} cells each",
            most=SHOWN,
        )
    return _ScheduleDrawing(schedule)


class _ScheduleDrawing(Drawing):
    def __init__(self, schedule: Schedule) -> None:
        lines = title(schedule, prove(schedule))
        super().__init__(lines[0], f"{'. '.join(lines[1:])}. {_LEGEND}.")
        self._schedule = schedule
        every = list(rounds(schedule))
        contents = {
            _content(schedule, cell, ranks)
            for snapshot in every
            for held in snapshot.held
            for cell, ranks in held.items()
        }
        self._wide = 12 + max(width_of(each, 12) for each in contents)
        wrap = max(_WRAP, self._left(schedule.world) - MARGIN)
        self._first = self.heading(lines, wrap=wrap) + 22
        for rank in range(schedule.world):
            middle = self._left(rank) + self._wide / 2
            self.words(middle, self._first - 8, f"rank {rank}", anchor="middle", weight="bold")
        for snapshot in every:
            self._row(snapshot)
        low = max(self._top(len(every)) - _GAP, self._top(len(every) - 1) + 34) + 12
        if schedule.kind in REDUCING:
            low = self.legend(low, _MEANINGS, wrap)
        self.note(low + 10, _LEGEND, wrap)

    def _left(self, rank: int) -> float:
        return _LEFT + rank * (self._wide + _BETWEEN)

    def _top(self, number: int) -> float:
        return self._first + number * (_BOX * self._schedule.cells + _GAP)

    def _row(self, snapshot: Snapshot) -> None:
        """Draw what each rank holds after a round, and the messages of the round."""
        top, above = self._top(snapshot.number), self._top(snapshot.number) - _GAP
        self.words(
            MARGIN,
            top + 13,
            f"round {snapshot.number}" if snapshot.number else "start",
            weight="bold",
        )
        if snapshot.number:
            self.words(MARGIN, top + 29, snapshot.how, size=12, fill=SOFT)
        arrived = {(each.dst, cell) for each in snapshot.transfers for cell in each.cells}
        for rank, held in enumerate(snapshot.held):
            for cell in range(self._schedule.cells):
                self._cell(rank, cell, top, held.get(cell), (rank, cell) in arrived)
        sends = Counter(each.src for each in snapshot.transfers)
        for each in snapshot.transfers:
            x, to_x = (self._left(rank) + self._wide / 2 for rank in (each.src, each.dst))
            curve = (x, above + 3), (x, above + 22), (to_x, top - 24), (to_x, top - 3)
            self.arrow(curve, "message")
            if sends[each.src] == 1 and self._schedule.cells > 1 and len(each.cells) <= 4:
                cells = "".join(map(letter, each.cells))
                side, anchor = (-5, "end") if to_x > x else (5, "start")
                self.words(x + side, above + 14, cells, size=12, fill=ARROW, anchor=anchor)

    def _cell(
        self, rank: int, cell: int, top: float, ranks: frozenset[int] | None, arrived: bool
    ) -> None:
        x, y = self._left(rank), top + cell * _BOX
        colour, tint = _colour(self._schedule, cell, ranks)
        edge = {"stroke": ARROW, "stroke-width": 2} if arrived else {"stroke": FAINT}
        inset = 1.5 if arrived else 0.5
        self.box(
            x + inset,
            y + inset,
            self._wide - 2 * inset,
            _BOX - 2 * inset,
            colour,
            tint=tint,
            **edge,
        )
        if ranks is not None:
            inside = _content(self._schedule, cell, ranks)
            self.words(x + self._wide / 2, y + 14, inside, anchor="middle", size=12)


def _content(schedule: Schedule, cell: int, ranks: frozenset[int]) -> str:
    inside = "".join(map(str, sorted(ranks))) if schedule.world <= 10 else str(len(ranks))
    return f"{letter(cell)} {inside}"


def _colour(schedule: Schedule, cell: int, ranks: frozenset[int] | None) -> tuple[str, float]:
    """Return a colour and its strength; it is stronger the more ranks the cell contains."""
    if ranks is None:
        return CARD, 1.0
    if schedule.kind not in REDUCING:
        return "var(--blue)", TINT
    if complete(schedule, cell, ranks):
        return "var(--green)", 0.3
    return "var(--blue)", 0.08 + 0.24 * (len(ranks) - 1) / max(1, schedule.world - 1)
