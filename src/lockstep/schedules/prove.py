"""Run a schedule on symbols, and check for every rank and cell that it does what it claims.

A cell's content is the expression of the contributions that were added in it. The proof fails, with
the round, rank and cell, if a rank sends what it does not have, a contribution is counted twice or
lost, a message brings nothing new, or a rank does not end with what the collective promises. The
expression is also the order of addition, which alone determines the bits that a rank gets.
"""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.errors import ScheduleError
from lockstep.schedules.schedule import Schedule, Transfer

Order = int | tuple["Order", "Order"]
"""A rank's contribution, or the sum of two orders."""


@dataclass(frozen=True, slots=True)
class Content:
    """The content of a cell: the ranks whose contributions it has, as bits, and the order of
    addition.
    """

    ranks: int
    order: Order


@dataclass(frozen=True, slots=True)
class Proof:
    """What is true of a schedule that was proved.

    `messages` counts those of all ranks. `cells_sent_by[r]` counts the cells that rank r sends (a
    cell is 1/cells of the tensor). `orders[cell]` is the order in which the contributions
    of a cell were added, the lower rank first. `same_bits` is whether all ranks that hold a cell at
    the end added it in the same order, and so hold the same bits.
    """

    rounds: int
    messages: int
    cells_sent_by: tuple[int, ...]
    orders: dict[int, str]
    same_bits: bool


def prove(schedule: Schedule) -> Proof:
    """Raise ScheduleError unless every rank ends with what the collective promises, with each
    contribution counted exactly once.

    Args:
        schedule: what is proved.
    """
    state = _before(schedule)
    messages = 0
    cells = [0] * schedule.world
    for number, transfers in enumerate(schedule.transfers(), start=1):
        _check_round(schedule, transfers, number)
        arriving = []
        for transfer in transfers:
            messages += 1
            cells[transfer.src] += len(transfer.cells)
            for cell in transfer.cells:
                arriving.append((transfer, cell, _sent(state, transfer, cell, number)))
        for transfer, cell, content in arriving:
            target = state[transfer.dst]
            target[cell] = _after(target.get(cell), content, transfer, cell, number)
    orders, same = _check_end(schedule, state)
    return Proof(
        rounds=len(schedule),
        messages=messages,
        cells_sent_by=tuple(cells),
        orders=orders,
        same_bits=same,
    )


def _before(schedule: Schedule) -> list[dict[int, Content]]:
    state = []
    for rank in range(schedule.world):
        cells = schedule.cells_before(rank)
        state.append(dict.fromkeys(cells, Content(1 << rank, rank)))
    return state


def _check_round(schedule: Schedule, transfers: list[Transfer], number: int) -> None:
    targets = set()
    ranks = range(schedule.world)
    for transfer in transfers:
        src = transfer.src
        dst = transfer.dst
        if src == dst or src not in ranks or dst not in ranks:
            raise ScheduleError(
                "schedule-wrong-ranks", number=number, src=src, dst=dst, last=ranks[-1]
            )
        for cell in transfer.cells:
            if (dst, cell) in targets:
                raise ScheduleError(
                    "schedule-order-left-to-chance", number=number, src=src, dst=dst, cell=cell
                )
            targets.add((dst, cell))


def _sent(state: list[dict[int, Content]], transfer: Transfer, cell: int, number: int) -> Content:
    content = state[transfer.src].get(cell)
    if content is None:
        raise ScheduleError(
            "schedule-sends-what-it-lacks",
            number=number,
            src=transfer.src,
            dst=transfer.dst,
            cell=cell,
        )
    return content


def _after(
    before: Content | None, content: Content, transfer: Transfer, cell: int, number: int
) -> Content:
    """Return the content of a rank's cell after `content` arrived in it."""
    position = {"number": number, "cell": cell, "src": transfer.src, "dst": transfer.dst}
    if not transfer.reduce:
        lost = _ranks(before.ranks & ~content.ranks) if before is not None else []
        if lost:
            raise ScheduleError("schedule-loses-contributions", ranks=lost, **position)
        if before is not None and before.ranks == content.ranks:
            raise ScheduleError("schedule-sends-nothing-new", **position)
        return content
    if before is None:
        raise ScheduleError("schedule-adds-to-nothing", **position)
    twice = _ranks(before.ranks & content.ranks)
    if twice:
        raise ScheduleError("schedule-counts-twice", ranks=twice, **position)
    return Content(before.ranks | content.ranks, (before.order, content.order))


def _check_end(schedule: Schedule, state: list[dict[int, Content]]) -> tuple[dict[int, str], bool]:
    orders: dict[int, str] = {}
    texts: dict[int, str] = {}  # by id: an order that was copied is the same object on many ranks
    same = True
    for rank, contents in enumerate(state):
        for cell in schedule.cells_after(rank):
            content = contents.get(cell)
            expected = _complete(schedule, cell)
            if content is None or content.ranks != expected:
                missing = _ranks(expected & ~(content.ranks if content else 0))
                raise ScheduleError("schedule-incomplete", rank=rank, cell=cell, ranks=missing)
            key = id(content.order)
            if key not in texts:
                texts[key] = written(content.order)
            same &= orders.setdefault(cell, texts[key]) == texts[key]
    return orders, same


def _complete(schedule: Schedule, cell: int) -> int:
    """Return the ranks whose contributions belong in a cell, as bits."""
    if schedule.reducing:
        return (1 << schedule.world) - 1
    if schedule.kind in ("broadcast", "scatter"):
        return 1 << schedule.root
    source = cell // schedule.world if schedule.kind == "all_to_all" else cell
    return 1 << source


def _ranks(bits: int) -> list[int]:
    return [rank for rank in range(bits.bit_length()) if bits >> rank & 1]


def written(order: Order) -> str:
    """Return the order as text: `((0+1)+(2+3))`. The lower rank stands first: a+b and b+a have the
    same bits. Not recursive, for rings of many ranks.
    """
    done: list[tuple[int, str]] = []  # least rank, text
    work: list[Order | None] = [order]
    while work:
        item = work.pop()
        if isinstance(item, int):
            done.append((item, str(item)))
        elif item is None:
            (least, first), (_, second) = sorted((done.pop(), done.pop()))
            done.append((least, f"({first}+{second})"))
        else:
            work += [None, *item]
    return done[0][1]
