"""An oracle for schedules: run the messages on Python integers and read off who was counted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from lockstep.collectives.addition_order import fold
from lockstep.schedules.algorithms import algorithms_of, schedule
from lockstep.schedules.schedule import (
    REDUCING,
    Kind,
    Round,
    Schedule,
    held_before,
    together,
    wanted_after,
)

KINDS: tuple[Kind, ...] = (
    "all_reduce",
    "reduce",
    "reduce_scatter",
    "broadcast",
    "all_gather",
    "scatter",
    "gather",
    "all_to_all",
)
ROOTED: tuple[Kind, ...] = ("reduce", "broadcast", "scatter", "gather")
NAMED = [(kind, name) for kind in KINDS for name in algorithms_of(kind)]
# a contribution would have to be counted this often before it passed for another one
BASE = 1 << 16


def schedules(kind: Kind, name: str, world: int) -> Iterator[Schedule]:
    """The schedule at every root, and with every number of ranks a node."""
    for root in range(world if kind in ROOTED else 1):
        for ranks_per_node in range(1, world + 2) if name == "hierarchical" else (None,):
            yield schedule(kind, name, world, root=root, ranks_per_node=ranks_per_node)


def counts_right(built: Schedule) -> bool:
    """Whether every rank ends with every contribution that it should have, each counted exactly
    once, if the messages are simply carried out.

    Rank r brings BASE**r to each of its cells, so that a sum shows in its digits how often each
    rank was counted in it. False as well where a rank sends what it does not have or adds to what
    is not there.
    """
    world, kind = built.world, built.kind
    held = [
        dict.fromkeys(held_before(kind, world, rank, built.root, built.cells), BASE**rank)
        for rank in range(world)
    ]
    for transfers in built.transfers():
        if any(cell not in held[each.src] for each in transfers for cell in each.cells):
            return False
        arriving = [(each, cell, held[each.src][cell]) for each in transfers for cell in each.cells]
        for each, cell, number in arriving:
            if each.reduce and cell not in held[each.dst]:
                return False
            held[each.dst][cell] = number + (held[each.dst][cell] if each.reduce else 0)
    everyone = sum(BASE**rank for rank in range(world))
    for rank in range(world):
        for cell in wanted_after(kind, world, rank, built.root, built.cells):
            if kind in REDUCING:
                expected = everyone
            elif kind in ("broadcast", "scatter"):
                expected = BASE**built.root
            else:
                expected = BASE ** (cell // world if kind == "all_to_all" else cell)
            if held[rank].get(cell) != expected:
                return False
    return True


def written_out(built: Schedule) -> Schedule:
    """The same rounds, each once: so that a single message can be changed."""
    rounds = []
    for each in built.rounds:
        rounds += [
            replace(each, cell=(each.cell + turn * each.shift) % built.cells, repeat=1, shift=0)
            for turn in range(each.repeat)
        ]
    return replace(built, rounds=tuple(rounds))


Message = tuple[int, int, int, int]
"""From rank, to rank, first cell, number of cells."""


def a_round(messages: Sequence[Message], reduce: bool) -> Round:
    src, dst, cell, count = np.array(messages, dtype=np.int64).reshape(-1, 4).T
    return together(src, dst, cell, reduce=reduce, count=count)


def mutants(built: Schedule) -> Iterator[tuple[str, Schedule]]:
    """Every schedule that differs in one message or one round; with what was done to it."""
    plain = written_out(built)
    for number, each in enumerate(plain.rounds):

        def changed(*instead: Round, number: int = number) -> Schedule:
            rounds = (*plain.rounds[:number], *instead, *plain.rounds[number + 1 :])
            return replace(plain, rounds=rounds)

        yield "exchanged copy and reduce", changed(replace(each, reduce=not each.reduce))
        columns = (each.src, each.dst, each.cell, each.count)
        messages = list(zip(*(column.tolist() for column in columns), strict=True))
        for i, (src, dst, cell, count) in enumerate(messages):
            others = messages[:i] + messages[i + 1 :]
            again = a_round([messages[i]], each.reduce)
            instead = [
                *(("another receiver", (src, rank, cell, count)) for rank in range(built.world)),
                *(("another sender", (rank, dst, cell, count)) for rank in range(built.world)),
            ]
            yield "dropped", changed(a_round(others, each.reduce))
            yield "doubled in a later round", changed(each, again)
            yield "doubled in its round", changed(a_round([*messages, messages[i]], each.reduce))
            for change, message in instead:
                if message != messages[i] and message[0] != message[1]:
                    yield change, changed(a_round([*others, message], each.reduce))
            if count > 1:
                fewer = (src, dst, cell, count - 1)
                yield "one cell less", changed(a_round([*others, fewer], each.reduce))


def folded(parts: Sequence[Tensor]) -> Tensor:
    """Their sum as shared memory adds it."""
    total = torch.empty_like(parts[0])
    fold(parts, "sum", total)
    return total
