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
from itertools import chain
from typing import Any

from lockstep.collectives import Proof, Schedule, Transfer, prove
from lockstep.errors import UsageError
from lockstep.tools.drawing import ARROW, CARD, FAINT, MARGIN, SOFT, TINT, Drawing, width_of
from lockstep.tools.timing.output_files import counted

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
_LEFT = 74  # px: the left margin
_BETWEEN = 30  # px: between columns
_BOX = 20  # px: the height of a box
_GAP = 46  # px: between rows
_WRAP = 450  # px: the width of a line of text
Cells = dict[int, frozenset[int]]
"""The cells that a rank holds, each with the ranks whose values it contains."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One round of a schedule, and the cells that each rank holds after it."""

    number: int
    transfers: Sequence[Transfer]
    contents: Sequence[Cells]

    @property
    def action(self) -> str:
        """Whether receivers add or replace cells: the same in all transfers of a round."""
        kinds = {transfer.reduce for transfer in self.transfers}
        assert len(kinds) == 1, "a round adds or replaces"
        return "add" if kinds == {True} else "replace"


def rounds(schedule: Schedule) -> Iterator[Snapshot]:
    """Yield a snapshot of each round. Round 0 is what each rank holds at the start."""
    contents: list[Cells] = []
    for rank in range(schedule.world):
        contents.append(dict.fromkeys(schedule.cells_before(rank), frozenset({rank})))
    yield Snapshot(0, (), contents)
    for number, transfers in enumerate(schedule.transfers(), start=1):
        before = contents
        contents = [dict(cells) for cells in before]
        for transfer in transfers:
            received = contents[transfer.dst]
            for cell in transfer.cells:
                ranks = before[transfer.src][cell]
                received[cell] = received[cell] | ranks if transfer.reduce else ranks
        yield Snapshot(number, transfers, contents)


def letter(cell: int) -> str:
    """Return a cell's name: a .. z, then a1 .. z1, and so on."""
    number, index = divmod(cell, 26)
    name = "abcdefghijklmnopqrstuvwxyz"[index]
    return f"{name}{number}" if number else name


def complete(schedule: Schedule, cell: int, ranks: frozenset[int]) -> bool:
    """Whether a cell contains the values of all ranks that it must contain."""
    return not schedule.reducing or len(ranks) == schedule.world


def title(schedule: Schedule, proof: Proof) -> list[str]:
    """Describe the schedule as a whole, in lines."""
    name = f"{schedule.name} {schedule.kind}".replace("_", "-")
    ranks = counted(schedule.world, "rank")
    rounds = counted(proof.rounds, "round")
    messages = counted(proof.messages, "message")
    lines = [f"{name}, {ranks}: {rounds}, {messages} in all", _sent(schedule, proof)]
    if schedule.reducing:
        bits = "the same bits on all ranks" if proof.same_bits else "other bits on some ranks"
        order = proof.orders.get(0)
        if order and schedule.world <= SHOWN:
            bits = f"cell a is added as {order}, {bits}"
        lines.append(bits)
    return lines


def _sent(schedule: Schedule, proof: Proof) -> str:
    suffix = f"/{schedule.cells}" if schedule.cells > 1 else ""
    ends = sorted({min(proof.cells_sent_by), max(proof.cells_sent_by)})
    share = " to ".join(f"{cells}{suffix}" for cells in ends)
    return f"each rank sends {share} {'of' if suffix else 'times'} the tensor"


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
            name = f"round {snapshot.number}".ljust(width)
            messages = "   ".join(map(_message, snapshot.transfers))
            lines.append(f"{name}  {messages}    {snapshot.action}")
        if shown:
            lines += _contents(schedule, snapshot)
    return "\n".join(lines)


def _message(transfer: Transfer) -> str:
    letters = [letter(cell) for cell in transfer.cells]
    listed = "".join(letters) if len(letters) <= 8 else f"{letters[0]}..{letters[-1]}"
    return f"{transfer.src} -> {transfer.dst} {listed}"


def _contents(schedule: Schedule, snapshot: Snapshot) -> list[str]:
    if schedule.kind == "all_to_all" and schedule.world > 4:
        return []  # world x world cells do not fit into a line
    rows = []
    for rank, cells in enumerate(snapshot.contents):
        parts = [_cell(schedule, cell, cells.get(cell)) for cell in range(schedule.cells)]
        rows.append(f"    rank {rank:<2} {'  '.join(parts)}".rstrip())
    return rows


def _cell(schedule: Schedule, cell: int, ranks: frozenset[int] | None) -> str:
    reducing = schedule.reducing
    content = "."
    mark = " "
    if ranks is not None:
        content = ("" if schedule.world <= 10 else ",").join(map(str, sorted(ranks)))
        if reducing and complete(schedule, cell, ranks):
            mark = "*"
    width = schedule.world if reducing else 1
    return f"{letter(cell)} {content:<{width}}{mark}"


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
        snapshots = list(rounds(schedule))
        widest = 0.0
        for snapshot in snapshots:
            for cell, ranks in chain(*map(dict.items, snapshot.contents)):
                widest = max(widest, width_of(_content(schedule, cell, ranks), 12))
        self._wide = 12 + widest
        wrap = max(_WRAP, self._left(schedule.world) - MARGIN)
        self._first = self.heading(lines, wrap=wrap) + 22
        for rank in range(schedule.world):
            name = f"rank {rank}"
            self.words(self._middle(rank), self._first - 8, name, anchor="middle", weight="bold")
        for snapshot in snapshots:
            self._row(snapshot)
        last_top = self._top(len(snapshots) - 1)
        low = max(self._top(len(snapshots)) - _GAP, last_top + 34) + 12
        if schedule.reducing:
            low = self.legend(low, _MEANINGS, wrap)
        self.note(low + 10, _LEGEND, wrap)

    def _left(self, rank: int) -> float:
        return _LEFT + rank * (self._wide + _BETWEEN)

    def _middle(self, rank: int) -> float:
        return self._left(rank) + self._wide / 2

    def _top(self, number: int) -> float:
        return self._first + number * (_BOX * self._schedule.cells + _GAP)

    def _row(self, snapshot: Snapshot) -> None:
        """Draw what each rank holds after a round, and the messages of the round."""
        top = self._top(snapshot.number)
        name = f"round {snapshot.number}" if snapshot.number else "start"
        self.words(MARGIN, top + 13, name, weight="bold")
        if snapshot.number:
            self.words(MARGIN, top + 29, snapshot.action, size=12, fill=SOFT)
        arrived: set[tuple[int, int]] = set()
        for transfer in snapshot.transfers:
            arrived.update((transfer.dst, cell) for cell in transfer.cells)
        for rank, cells in enumerate(snapshot.contents):
            for cell in range(self._schedule.cells):
                self._cell(rank, cell, top, cells.get(cell), (rank, cell) in arrived)
        sends = Counter(transfer.src for transfer in snapshot.transfers)
        for transfer in snapshot.transfers:
            self._message(transfer, top, alone=sends[transfer.src] == 1)

    def _message(self, transfer: Transfer, top: float, *, alone: bool) -> None:
        """Draw an arrow to a row, with its cells if it is the only one of its sender."""
        above = top - _GAP
        x = self._middle(transfer.src)
        to_x = self._middle(transfer.dst)
        curve = (x, above + 3), (x, above + 22), (to_x, top - 24), (to_x, top - 3)
        self.arrow(curve, "message")
        if not alone or self._schedule.cells == 1 or len(transfer.cells) > 4:
            return
        cells = "".join(map(letter, transfer.cells))
        if to_x > x:
            self.words(x - 5, above + 14, cells, size=12, fill=ARROW, anchor="end")
        else:
            self.words(x + 5, above + 14, cells, size=12, fill=ARROW)

    def _cell(
        self, rank: int, cell: int, top: float, ranks: frozenset[int] | None, arrived: bool
    ) -> None:
        x = self._left(rank)
        y = top + cell * _BOX
        colour, tint = _colour(self._schedule, cell, ranks)
        inset = 0.5
        edge: dict[str, Any] = {"stroke": FAINT}
        if arrived:
            inset = 1.5
            edge = {"stroke": ARROW, "stroke-width": 2}
        width = self._wide - 2 * inset
        self.box(x + inset, y + inset, width, _BOX - 2 * inset, colour, tint=tint, **edge)
        if ranks is not None:
            content = _content(self._schedule, cell, ranks)
            self.words(self._middle(rank), y + 14, content, anchor="middle", size=12)


def _content(schedule: Schedule, cell: int, ranks: frozenset[int]) -> str:
    if schedule.world > 10:
        return f"{letter(cell)} {len(ranks)}"
    return f"{letter(cell)} {''.join(map(str, sorted(ranks)))}"


def _colour(schedule: Schedule, cell: int, ranks: frozenset[int] | None) -> tuple[str, float]:
    """Return a colour and its strength; it is stronger the more ranks the cell contains."""
    if ranks is None:
        return CARD, 1.0
    if not schedule.reducing:
        return "var(--blue)", TINT
    if complete(schedule, cell, ranks):
        return "var(--green)", 0.3
    share = (len(ranks) - 1) / (schedule.world - 1)
    return "var(--blue)", 0.08 + 0.24 * share
