"""A schedule as a picture in text: who sends what to whom in each step, and what everybody holds then.

    step 1   0 -> 1 a   1 -> 2 b   2 -> 3 c   3 -> 0 d    add
             rank 0   a 0     b 0     c 0     d 03

Cells are letters; behind each stand the ranks that are counted in it. A `*` marks a cell that is complete. The rounds of the schedule that
really runs are drawn, one a line: `step` is the word of the teaching texts for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lockstep.collectives.algorithms import algorithms_of
from lockstep.collectives.prove import Proof, prove
from lockstep.collectives.schedule import REDUCING, Kind, Schedule, Transfer, held_before
from lockstep.errors import UsageError

SHOWN = 16
"""The most ranks whose contents are written out."""


@dataclass(frozen=True, slots=True)
class Step:
    """One round of a schedule, and what everybody holds after it: `held[rank][cell]` is the ranks counted in the cell."""

    number: int
    transfers: Sequence[Transfer]
    held: Sequence[dict[int, frozenset[int]]]

    @property
    def how(self) -> str:
        """What receivers do with what arrives: the same in all transfers of a step, because it is a round's."""
        kinds = {transfer.reduce for transfer in self.transfers}
        assert len(kinds) == 1, "a round adds or replaces"
        return "add" if kinds == {True} else "replace"


def steps(schedule: Schedule) -> Iterator[Step]:
    """Step 0 is what everybody holds at the start."""
    held = [
        {cell: frozenset({rank}) for cell in held_before(schedule.kind, schedule.world, rank, schedule.root, schedule.cells)}
        for rank in range(schedule.world)
    ]
    yield Step(0, (), [dict(each) for each in held])
    for number, transfers in enumerate(schedule.transfers(), start=1):
        sent = [{cell: held[transfer.src][cell] for cell in transfer.cells} for transfer in transfers]
        for transfer, content in zip(transfers, sent, strict=True):
            for cell, ranks in content.items():
                held[transfer.dst][cell] = held[transfer.dst][cell] | ranks if transfer.reduce else ranks
        yield Step(number, transfers, [dict(each) for each in held])


def letter(cell: int) -> str:
    """a .. z, then a1 .. z1, and so on."""
    return "abcdefghijklmnopqrstuvwxyz"[cell % 26] + (str(cell // 26) if cell >= 26 else "")


def complete(schedule: Schedule, cell: int, ranks: frozenset[int]) -> bool:
    """Whether all that belongs into a cell is in it."""
    return len(ranks) == schedule.world if schedule.kind in REDUCING else True


def title(schedule: Schedule, proof: Proof) -> list[str]:
    """What is true of the schedule as a whole, in lines."""
    name = schedule.name.replace("_", "-")
    count = f"{proof.rounds} step{'s' * (proof.rounds != 1)}, {proof.messages} message{'s' * (proof.messages != 1)} in all"
    lines = [f"{name} {schedule.kind.replace('_', '-')}, {schedule.world} rank{'s' * (schedule.world > 1)}: {count}"]
    sent = [str(cells) if schedule.cells == 1 else f"{cells}/{schedule.cells}" for cells in sorted(set(proof.cells_sent_by))]
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
            lines.append(f"{f'step {step.number}':<{width}}  {'   '.join(map(_message, step.transfers))}    {step.how}")
        if shown:
            lines += _contents(schedule, step)
    return "\n".join(lines)


def _message(transfer: Transfer) -> str:
    cells = [letter(cell) for cell in transfer.cells]
    return f"{transfer.src} -> {transfer.dst} {''.join(cells) if len(cells) <= 8 else f'{cells[0]}..{cells[-1]}'}"


def _contents(schedule: Schedule, step: Step) -> list[str]:
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


# -- before and after --------------------------------------------------------------------------------------------------------------


def before_and_after(kind: Kind, rows: Sequence[Sequence[float]], *, op: str = "sum", algorithm: str | None = None, root: int = 0) -> str:
    """What every rank holds before a collective and after it, run in one process by the schedule of that name.

    Row r is rank r's tensor; in a scatter the piece that the root has for rank r, in an all-to-all one element for each rank.
    """
    import torch  # the other pictures need none

    from lockstep.collectives import in_process

    dtype = torch.int64 if all(isinstance(number, int) for row in rows for number in row) else torch.float64
    tensors = [torch.tensor(row, dtype=dtype) for row in rows]
    world = len(tensors)
    if not 0 <= root < world:
        raise UsageError(f"root={root} is not one of the {world} ranks: they are 0 to {world - 1}")
    if kind in (*REDUCING, "broadcast") and len({len(row) for row in rows}) > 1:
        lengths = ", ".join(str(len(row)) for row in rows)
        raise UsageError(f"rows of {lengths} numbers: in {_a(kind)} all ranks have equally many")
    if algorithm is not None and algorithm not in (known := [each for each in algorithms_of(kind) if each != "hierarchical"]):
        shown = algorithm.replace("_", "-")
        raise UsageError(f"{shown!r} is no algorithm of {_a(kind)}: choose one of {', '.join(each.replace('_', '-') for each in known)}")
    name = algorithm or {"all_reduce": "ring", "all_gather": "ring", "reduce_scatter": "ring", "all_to_all": "direct"}.get(kind, "tree")
    nothing = "nothing"
    before: list[object] = list(tensors)
    after: Sequence[object]
    if kind == "all_reduce":
        after = in_process.all_reduce([tensor.clone() for tensor in tensors], op, name)
    elif kind == "reduce":
        after = in_process.reduce([tensor.clone() for tensor in tensors], root, op, name)
    elif kind == "broadcast":
        after = in_process.broadcast([tensor.clone() for tensor in tensors], root, name)
    elif kind == "reduce_scatter":
        after = in_process.reduce_scatter(tensors, op, name)
    elif kind == "all_gather":
        after = in_process.all_gather(tensors, name)
    elif kind == "scatter":
        before = [tensors if rank == root else nothing for rank in range(world)]
        after = in_process.scatter(tensors, root, name)
    elif kind == "gather":
        found = in_process.gather(tensors, root, name)
        after = [found if rank == root else nothing for rank in range(world)]
    else:
        if any(len(tensor) != world for tensor in tensors):
            raise UsageError(f"in an all-to-all every rank has one number for each of the {world} ranks: {world} rows of {world}")
        after = [torch.cat(pieces) for pieces in in_process.all_to_all([tensor.split(1) for tensor in tensors], name)]
    where = f", root {root}" if kind in ("reduce", "broadcast", "scatter", "gather") else ""
    how = f", {op}" if kind in REDUCING else ""
    left = [_shown(value) for value in before]
    width = max(map(len, [*left, "before"]))
    lines = [f"{kind.replace('_', '-')}{how}{where}, by {name.replace('_', '-')}", f"        {'before':<{width}}    after"]
    lines += [f"rank {rank}  {value:<{width}}    {_shown(then)}" for rank, (value, then) in enumerate(zip(left, after, strict=True))]
    return "\n".join(lines)


def _a(kind: Kind) -> str:
    return f"{'an' if kind.startswith('a') else 'a'} {kind.replace('_', '-')}"


def _shown(value: object) -> str:
    if hasattr(value, "tolist"):  # a tensor
        return f"[{' '.join(str(number) if isinstance(number, int) else f'{number:g}' for number in value.tolist())}]"
    return " ".join(_shown(each) for each in value) if isinstance(value, list) else str(value)
