"""A schedule as text and as a drawing: who sends what to whom in each step, and what everybody
holds then.

    step 1   0 -> 1 a   1 -> 2 b   2 -> 3 c   3 -> 0 d    add
             rank 0   a 0     b 0     c 0     d 03

Cells are letters; behind each stand the ranks that are counted in it. A `*` marks a cell that is
complete. The rounds of the schedule that really runs are drawn, one a line: `step` is the word of
the teaching texts for them.

In the drawing a column is a rank and a row a step. Boxes are cells, darker the more ranks are
counted in them; arrows are messages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lockstep.collectives.prove import Proof, prove
from lockstep.collectives.schedule import REDUCING, Schedule, Transfer, held_before
from lockstep.data.windows import counted
from lockstep.errors import UsageError
from lockstep.tools.svg import Drawing, blend

SHOWN = 16
"""The most ranks whose contents are written out."""
# Light blue to blue; green when complete.
_FEW, _MANY, _DONE, _EMPTY = "#deebf7", "#6ba0d2", "#a1d99b", "#f4f4f4"
# In px: above the first row, left of the first column, a box's height, between two rows.
_TOP, _LEFT, _BOX, _GAP = 118, 86, 30, 74


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One round of a schedule, and what everybody holds after it: `held[rank][cell]` is the
    ranks counted in the cell.
    """

    number: int
    transfers: Sequence[Transfer]
    held: Sequence[dict[int, frozenset[int]]]

    @property
    def how(self) -> str:
        """What receivers do with what arrives: the same in all transfers of a step, because it
        is a round's.
        """
        kinds = {transfer.reduce for transfer in self.transfers}
        assert len(kinds) == 1, "a round adds or replaces"
        return "add" if kinds == {True} else "replace"


def steps(schedule: Schedule) -> Iterator[Snapshot]:
    """Step 0 is what everybody holds at the start."""
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
    """a .. z, then a1 .. z1, and so on."""
    return "abcdefghijklmnopqrstuvwxyz"[cell % 26] + (str(cell // 26) if cell >= 26 else "")


def complete(schedule: Schedule, cell: int, ranks: frozenset[int]) -> bool:
    """Whether all that belongs into a cell is in it."""
    return len(ranks) == schedule.world if schedule.kind in REDUCING else True


def title(schedule: Schedule, proof: Proof) -> list[str]:
    """What is true of the schedule as a whole, in lines."""
    name = schedule.name.replace("_", "-")
    count = f"{counted(proof.rounds, 'step')}, {counted(proof.messages, 'message')} in all"
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
    """The whole picture. Beyond 16 ranks contents are left out, and said to be."""
    lines = title(schedule, prove(schedule))
    shown = schedule.world <= SHOWN
    if not shown:
        lines.append(f"contents are written out for up to {SHOWN} ranks")
    width = len(f"step {len(schedule)}")
    for step in steps(schedule):
        if step.number == 0:
            lines += ["", "start"] if shown else [""]
        else:
            lines.append(
                f"{f'step {step.number}':<{width}}  {'   '.join(map(_message, step.transfers))}   "
                f" {step.how}"
            )
        if shown:
            lines += _contents(schedule, step)
    return "\n".join(lines)


def _message(transfer: Transfer) -> str:
    cells = [letter(cell) for cell in transfer.cells]
    return (
        f"{transfer.src} -> {transfer.dst}"
        f" {''.join(cells) if len(cells) <= 8 else f'{cells[0]}..{cells[-1]}'}"
    )


def _contents(schedule: Schedule, step: Snapshot) -> list[str]:
    rows = []
    cells = range(schedule.cells)
    if schedule.kind == "all_to_all":  # cells of others' business are left out
        cells = range(schedule.cells) if schedule.world <= 4 else range(0)
    for rank, held in enumerate(step.held):
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


def drawing(schedule: Schedule) -> ScheduleDrawing:
    """Raises UsageError for more ranks than fit on a page."""
    if schedule.world > SHOWN or schedule.cells > SHOWN:
        raise UsageError(
            "drawing-too-large",
            what=f"{schedule.world} ranks with {schedule.cells} cells each",
            most=SHOWN,
        )
    return ScheduleDrawing(schedule)


class ScheduleDrawing(Drawing):
    """A column is a rank, a row a step."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._adds = schedule.kind in REDUCING
        self._cell = max(38.0, 24.0 + 8.0 * (schedule.world if self._adds else 2))  # px
        self._wide = self._cell * schedule.cells
        every = list(steps(schedule))
        super().__init__(self._left(schedule.world) + 20, self._top(len(every) - 1) + _BOX + 40)
        first, *others = title(schedule, prove(schedule))
        self.words(20, 28, first, size=17, weight="bold")
        for number, line in enumerate(others):
            self.words(20, 48 + 18 * number, line)
        for rank in range(schedule.world):
            middle = self._left(rank) + self._wide / 2
            self.words(middle, _TOP - 12, f"rank {rank}", anchor="middle", weight="bold")
        for step in every:
            self._row(step)
        legend = "a box: a cell that is there; empty: not there"
        if self._adds:
            legend = (
                "a box: cell and the ranks counted in it, green when complete; an arrow from"
                " between boxes takes several along"
            )
        self.words(20, self.height - 10, legend, size=12)

    def _left(self, rank: int) -> float:
        return _LEFT + rank * (self._wide + 34)

    def _top(self, step: int) -> float:
        return _TOP + step * (_BOX + _GAP)

    def _row(self, step: Snapshot) -> None:
        """What everybody holds, and the messages that have led to it."""
        top = self._top(step.number)
        name = f"step {step.number}" if step.number else "start"
        self.words(20, top + 20, name, weight="bold")
        for rank, held in enumerate(step.held):
            for cell in range(self._schedule.cells):
                x, ranks = self._left(rank) + cell * self._cell, held.get(cell)
                self.box(x, top, self._cell, _BOX, self._colour(cell, ranks))
                if ranks is not None:
                    few = self._schedule.world <= 10
                    inside = "".join(map(str, sorted(ranks))) if few else len(ranks)
                    said = f"{letter(cell)} {inside}"
                    self.words(x + self._cell / 2, top + 20, said, anchor="middle", size=12)
        above = top - _GAP
        for transfer in step.transfers:
            middle = (transfer.cells[0] + transfer.cells[-1] + 1) / 2 * self._cell
            x, to_x = self._left(transfer.src) + middle, self._left(transfer.dst) + middle
            curve = (x, above + 3), (x, above + 34), (to_x, top - 36), (to_x, top - 3)
            self.arrow(curve, "message")
        if step.number:
            self.words(20, above + _GAP / 2 + 4, step.how, size=12)

    def _colour(self, cell: int, ranks: frozenset[int] | None) -> str:
        if ranks is None:
            return _EMPTY
        if self._adds and complete(self._schedule, cell, ranks):
            return _DONE
        share = (len(ranks) - 1) / max(1, self._schedule.world - 1) if self._adds else 0.4
        return blend(_FEW, _MANY, share)
