"""The proof accepts every schedule, and none that differs in one message unless it is right too."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

from lockstep.errors import ScheduleError
from lockstep.schedules.algorithms import schedule
from lockstep.schedules.prove import prove, written
from lockstep.schedules.schedule import Kind, Round, Schedule, together
from tests.collectives.numbers import NAMED, ROOTED, counts_right, mutants, schedules
from tests.refused import refused


def accepted(built: Schedule) -> bool:
    try:
        prove(built)
    except ScheduleError:
        return False
    return True


def every(kind: Kind, name: str) -> Iterator[Schedule]:
    for world in range(1, 10):
        yield from schedules(kind, name, world)
    for world in (*range(10, 18), 32, 64, 128):
        for ranks_per_node in (3, 8, world) if name == "hierarchical" else (None,):
            yield schedule(
                kind,
                name,
                world,
                root=world // 3 if kind in ROOTED else 0,
                ranks_per_node=ranks_per_node,
            )


@pytest.mark.parametrize(("kind", "name"), NAMED)
def test_every_schedule_is_proved_and_all_ranks_add_in_the_same_order(
    kind: Kind, name: str
) -> None:
    for built in every(kind, name):
        proof = prove(built)
        assert proof.same_bits
        assert proof.rounds == len(built)
        assert proof.messages == sum(map(len, built.transfers()))
        if built.world <= 9:
            assert counts_right(built)


@pytest.mark.parametrize(("kind", "name"), NAMED)
def test_a_schedule_with_one_wrong_message_is_rejected(kind: Kind, name: str) -> None:
    """Where the changed schedule is right too, as by another sender, the oracle says so."""
    seen, right = Counter[str](), Counter[str]()
    for built in (each for world in range(2, 7) for each in schedules(kind, name, world)):
        for change, mutant in mutants(built):
            seen[change] += 1
            if accepted(mutant):
                right[change] += 1
                assert counts_right(mutant), change
    assert {
        "exchanged copy and reduce",
        "dropped",
        "doubled in a later round",
        "doubled in its round",
    } <= set(seen)
    assert set(right) <= {"another sender", "another receiver"}, right
    assert right.total() < seen.total() / 2


add, copy = partial(together, reduce=True), partial(together, reduce=False)


@pytest.mark.parametrize(
    ("kind", "world", "cells", "rounds", "code", "values"),
    [
        ("all_reduce", 2, 1, [add(0, 5)], "wrong-ranks", {"src": 0, "dst": 5, "last": 1}),
        ("all_reduce", 2, 1, [add(1, 1)], "wrong-ranks", {"src": 1, "dst": 1, "last": 1}),
        ("all_reduce", 2, 1, [add(1, 0)], "incomplete", {"rank": 1, "cell": 0, "ranks": [0]}),
        ("all_reduce", 2, 1, [copy(1, 0)], "loses-contributions", {"number": 1, "ranks": [0]}),
        ("all_reduce", 2, 1, [add(1, 0)] * 2, "counts-twice", {"number": 2, "ranks": [1]}),
        ("all_reduce", 3, 1, [add([1, 2], [0, 0])], "order-left-to-chance", {"src": 2, "dst": 0}),
        ("broadcast", 3, 1, [copy(1, 2)], "sends-what-it-lacks", {"number": 1, "src": 1}),
        ("broadcast", 2, 1, [copy(0, 1)] * 2, "sends-nothing-new", {"number": 2, "dst": 1}),
        ("broadcast", 2, 1, [add(0, 1)], "adds-to-nothing", {"cell": 0, "src": 0, "dst": 1}),
        ("all_gather", 2, 2, [copy(0, 1, 0)], "incomplete", {"rank": 0, "cell": 1, "ranks": [1]}),
    ],
)
def test_what_is_wrong_is_said(
    kind: Kind, world: int, cells: int, rounds: list[Round], code: str, values: dict[str, Any]
) -> None:
    with refused(f"schedule-{code}", ScheduleError, **values):
        prove(Schedule("by hand", kind, world, cells, tuple(rounds)))


def test_ranks_that_add_in_different_orders_are_told() -> None:
    """Everyone adds its left neighbour's, then what the rank opposite has."""
    ranks = np.arange(4)
    rounds = (add(ranks, (ranks + 1) % 4), add(ranks, (ranks + 2) % 4))
    proof = prove(Schedule("by hand", "all_reduce", 4, 1, rounds))
    assert proof.orders == {0: "((0+3)+(1+2))"}  # rank 0's; rank 1 has ((0+1)+(2+3))
    assert not proof.same_bits


def test_an_order_is_written_with_the_lesser_rank_first() -> None:
    assert written(((3, 2), (1, 0))) == "((0+1)+(2+3))"
    long: object = 0
    for rank in range(1, 5000):  # deeper than Python recurses
        long = (long, rank)
    assert written(long).startswith("(" * 4999 + "0+1)+2)")  # type: ignore[arg-type]
