"""The proof accepts every schedule there is, and no schedule that differs from it in one
message, unless that one is right as well.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.collectives.algorithms import schedule
from lockstep.collectives.prove import prove, written
from lockstep.collectives.schedule import Kind, Schedule, together
from lockstep.errors import ScheduleError
from tests.collectives.numbers import NAMED, ROOTED, counts_right, mutants, schedules, written_out


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
        assert proof.messages == sum(proof.messages_of)
        if built.world <= 9:
            assert counts_right(built)


@pytest.mark.parametrize(("kind", "name"), NAMED)
def test_a_schedule_with_one_wrong_message_is_rejected(kind: Kind, name: str) -> None:
    """A message that takes another way can be part of another right schedule (who has a cell may
    send it as well); then the oracle says so too.
    """
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


def ways(built: Schedule) -> list[tuple[int, int]]:
    return [(int(each.src[0]), int(each.dst[0])) for each in built.rounds]


def test_which_mutants_are_right_schedules_too() -> None:
    """Rank 1 may pass on what it has; and a sum may be collected by way of another rank."""
    passed_on = [
        mutant for _, mutant in mutants(schedule("broadcast", "central", 3)) if accepted(mutant)
    ]
    assert [ways(mutant) for mutant in passed_on] == [[(0, 1), (1, 2)]]
    collected = [
        mutant for _, mutant in mutants(schedule("reduce", "central", 3)) if accepted(mutant)
    ]
    assert [ways(mutant) for mutant in collected] == [[(1, 2), (2, 0)]]
    assert prove(collected[0]).orders == {0: "(0+(1+2))"}


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_what_is_accepted_is_right_also_after_several_changes(data: st.DataObject) -> None:
    kind, name = data.draw(st.sampled_from(NAMED))
    built = data.draw(st.sampled_from(list(schedules(kind, name, data.draw(st.integers(2, 5))))))
    for _ in range(data.draw(st.integers(1, 3))):
        every = list(mutants(built))
        if not every:
            break
        built = every[data.draw(st.integers(0, len(every) - 1))][1]
    if accepted(built):
        assert counts_right(built)


@pytest.mark.parametrize(("kind", "name"), NAMED)
def test_rounds_written_out_are_the_same_schedule(kind: Kind, name: str) -> None:
    for built in (each for world in range(1, 9) for each in schedules(kind, name, world)):
        assert prove(written_out(built)) == prove(built)


ALL = ("all_reduce", 2, 1)


@pytest.mark.parametrize(
    ("kind", "world", "cells", "rounds", "message"),
    [
        (*ALL, [together(0, 5, reduce=True)], "round 1: 0 -> 5: ranks go from 0 to 1"),
        (*ALL, [together(1, 1, reduce=True)], "round 1: 1 -> 1: a rank sends to itself"),
        (
            *ALL,
            [together(1, 0, reduce=True)],
            "at the end rank 1's cell 0 lacks the contributions of ranks 0",
        ),
        (
            *ALL,
            [together(1, 0, reduce=False)],
            "round 1: cell 0 from rank 1 to 0 replaces contributions of ranks 0, which are lost",
        ),
        (
            *ALL,
            [together(1, 0, reduce=True)] * 2,
            "round 2: cell 0 from rank 1 to 0 counts the contributions of ranks 1 twice",
        ),
        (
            "all_reduce",
            3,
            1,
            [together([1, 2], [0, 0], reduce=True)],
            (
                "round 1: 2 -> 0: rank 0 receives cell 0 twice in one round; the order would be"
                " left to chance"
            ),
        ),
        (
            "broadcast",
            3,
            1,
            [together(1, 2, reduce=False)],
            "round 1: rank 2 waits for cell 0 from rank 1, which does not have it",
        ),
        (
            "broadcast",
            2,
            1,
            [together(0, 1, reduce=False)] * 2,
            "round 2: cell 0 from rank 0 to 1 brings nothing new",
        ),
        (
            "broadcast",
            2,
            1,
            [together(0, 1, reduce=True)],
            (
                "round 1: cell 0 from rank 0 to 1 is to be added, but the receiver holds nothing to"
                " add it to"
            ),
        ),
        ("all_gather", 2, 2, [together(0, 1, 0, reduce=False)], "at the end rank 0 has no cell 1"),
    ],
)
def test_what_is_wrong_is_said(
    kind: Kind, world: int, cells: int, rounds: list, message: str
) -> None:  # type: ignore[type-arg]
    with pytest.raises(ScheduleError) as caught:
        prove(Schedule("by hand", kind, world, cells, tuple(rounds)))
    assert str(caught.value) == message


def test_ranks_that_add_in_different_orders_are_told() -> None:
    """Everyone adds its left neighbour's, then what the rank opposite has: complete in two
    rounds, and not the same bits.
    """
    ranks = np.arange(4)
    rounds = (
        together(ranks, (ranks + 1) % 4, reduce=True),
        together(ranks, (ranks + 2) % 4, reduce=True),
    )
    proof = prove(Schedule("by hand", "all_reduce", 4, 1, rounds))
    assert proof.orders == {0: "((0+3)+(1+2))"}  # rank 0's; rank 1 has ((0+1)+(2+3))
    assert not proof.same_bits


def test_an_order_is_written_with_the_lesser_rank_first() -> None:
    assert written(((3, 2), (1, 0))) == "((0+1)+(2+3))"
    assert written(5) == "5"
    long: object = 0
    for rank in range(1, 5000):
        long = (long, rank)
    assert written(long).startswith("(" * 4999 + "0+1)+2)")  # type: ignore[arg-type]
