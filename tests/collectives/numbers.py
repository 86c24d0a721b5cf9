"""An oracle for schedules: run the messages on Python integers and read off who was counted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from lockstep.collectives.addition_order import fold
from lockstep.collectives.algorithms import algorithms_of, schedule
from lockstep.collectives.schedule import (
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


def mutants(built: Schedule) -> Iterator[tuple[str, Schedule]]:
    """Every schedule that differs in one message or one round; with what was done to it."""
    plain = written_out(built)
    for number, each in enumerate(plain.rounds):

        def changed(*instead: Round, number: int = number) -> Schedule:
            return replace(
                plain, rounds=(*plain.rounds[:number], *instead, *plain.rounds[number + 1 :])
            )

        yield "exchanged copy and reduce", changed(replace(each, reduce=not each.reduce))
        for i in range(len(each)):
            src, dst, cell, count = (
                int(part[i]) for part in (each.src, each.dst, each.cell, each.count)
            )
            again = together(src, dst, cell, reduce=each.reduce, count=count)
            yield "dropped", changed(_without(each, i))
            yield "doubled in a later round", changed(each, again)
            yield "doubled in its round", changed(_with(each, i, src, dst, extra=True))
            for rank in range(built.world):
                if rank not in (src, dst):
                    yield "another receiver", changed(_with(each, i, src, rank))
                    yield "another sender", changed(_with(each, i, rank, dst))
            if count > 1:
                yield "one cell less", changed(_with(each, i, src, dst, count=count - 1))


def _without(each: Round, i: int) -> Round:
    keep = [k for k in range(len(each)) if k != i]
    return replace(
        each, src=each.src[keep], dst=each.dst[keep], cell=each.cell[keep], count=each.count[keep]
    )


def _with(
    each: Round, i: int, src: int, dst: int, *, count: int | None = None, extra: bool = False
) -> Round:
    keep = [*range(len(each)), i] if extra else list(range(len(each)))
    sources, targets, cells, counts = (
        part[keep].copy() for part in (each.src, each.dst, each.cell, each.count)
    )
    sources[i], targets[i] = src, dst
    if count is not None:
        counts[i] = count
    return replace(each, src=sources, dst=targets, cell=cells, count=counts)


def folded(parts: Sequence[Tensor]) -> Tensor:
    """Their sum as shared memory adds it."""
    total = torch.empty_like(parts[0])
    fold(parts, "sum", total)
    return total
