"""Run a schedule on symbols, and check for every rank and cell that it does what it claims.

A cell's content is the expression of the contributions that were added in it. The proof fails, with
the round, rank and cell, if a rank sends what it does not have, a contribution is counted twice or
lost, a message brings nothing new, or a rank does not end with what the collective promises. The
expression is also the order of addition, which alone determines the bits that a rank gets.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from lockstep.collectives.schedule import REDUCING, Schedule, Transfer, held_before, wanted_after
from lockstep.errors import ScheduleError

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
    """
    state = _before(schedule)
    messages, cells = 0, Counter[int]()
    for number, transfers in enumerate(schedule.transfers(), start=1):
        _check_round(schedule, transfers, number)
        arriving = [
            (transfer, cell, _sent(state, transfer, cell, number))
            for transfer in transfers
            for cell in transfer.cells
        ]
        for transfer, cell, content in arriving:
            held = state[transfer.dst].get(cell)
            state[transfer.dst][cell] = _after(held, content, transfer, cell, number)
        messages += len(transfers)
        for transfer in transfers:
            cells[transfer.src] += len(transfer.cells)
    orders, same = _check_end(schedule, state)
    return Proof(
        rounds=len(schedule),
        messages=messages,
        cells_sent_by=tuple(cells[rank] for rank in range(schedule.world)),
        orders=orders,
        same_bits=same,
    )


def _before(schedule: Schedule) -> list[dict[int, Content]]:
    return [
        {
            cell: Content(1 << rank, rank)
            for cell in held_before(
                schedule.kind, schedule.world, rank, schedule.root, schedule.cells
            )
        }
        for rank in range(schedule.world)
    ]


def _check_round(schedule: Schedule, transfers: list[Transfer], number: int) -> None:
    into = set()
    for transfer in transfers:
        src, dst, ranks = transfer.src, transfer.dst, range(schedule.world)
        if src == dst or src not in ranks or dst not in ranks:
            raise ScheduleError(
                "schedule-wrong-ranks", number=number, src=src, dst=dst, last=ranks[-1]
            )
        for cell in transfer.cells:
            if (dst, cell) in into:
                raise ScheduleError(
                    "schedule-order-left-to-chance", number=number, src=src, dst=dst, cell=cell
                )
            into.add((dst, cell))


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
    held: Content | None, content: Content, transfer: Transfer, cell: int, number: int
) -> Content:
    where = {"number": number, "cell": cell, "src": transfer.src, "dst": transfer.dst}
    if not transfer.reduce:
        if held is not None and held.ranks & ~content.ranks:
            lost = _ranks(held.ranks & ~content.ranks)
            raise ScheduleError("schedule-loses-contributions", ranks=lost, **where)
        if held is not None and held.ranks == content.ranks:
            raise ScheduleError("schedule-sends-nothing-new", **where)
        return content
    if held is None:
        raise ScheduleError("schedule-adds-to-nothing", **where)
    if held.ranks & content.ranks:
        twice = _ranks(held.ranks & content.ranks)
        raise ScheduleError("schedule-counts-twice", ranks=twice, **where)
    return Content(held.ranks | content.ranks, (held.order, content.order))


def _check_end(schedule: Schedule, state: list[dict[int, Content]]) -> tuple[dict[int, str], bool]:
    orders: dict[int, str] = {}
    texts: dict[int, str] = {}  # by id: an order that was copied is the same object on many ranks
    same = True
    for rank in range(schedule.world):
        for cell in wanted_after(
            schedule.kind, schedule.world, rank, schedule.root, schedule.cells
        ):
            content, expected = state[rank].get(cell), _complete(schedule, cell)
            if content is None or content.ranks != expected:
                missing = _ranks(expected & ~(content.ranks if content else 0))
                raise ScheduleError("schedule-incomplete", rank=rank, cell=cell, ranks=missing)
            order = texts.get(id(content.order)) or texts.setdefault(
                id(content.order), written(content.order)
            )
            same &= orders.setdefault(cell, order) == order
    return orders, same


def _complete(schedule: Schedule, cell: int) -> int:
    """Return the ranks whose contributions belong in a cell, as bits."""
    if schedule.kind in REDUCING:
        return (1 << schedule.world) - 1
    if schedule.kind in ("broadcast", "scatter"):
        return 1 << schedule.root
    return 1 << (cell // schedule.world if schedule.kind == "all_to_all" else cell)


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
