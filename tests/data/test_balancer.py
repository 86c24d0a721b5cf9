"""When shares move, and when they do not: a run is played from the seconds that a micro-batch
takes each rank.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.data.balancer import (
    LATE,
    MEASURED,
    WARM_UP,
    Balancer,
    NewShares,
    in_proportion,
    in_words,
    longest,
    quickest,
)
from lockstep.data.windows import Plan
from tests.refused import refused

# (step, shares) -> of a micro-batch, by rank
Seconds = Callable[[int, tuple[int, ...]], Sequence[float]]


def played(balancer: Balancer, steps: int, seconds: Seconds) -> list[tuple[int, NewShares]]:
    """(step, what moved before it). As in a training, a step tells of the one before."""
    moves = []
    told: Sequence[float] = (0.0,) * len(balancer.by_rank)
    for step in range(steps):
        moved = balancer.begin()
        if moved is not None:
            moves.append((step, moved))
        balancer.note(told)
        told = [
            each if count else 0.0
            for each, count in zip(seconds(step, balancer.by_rank), balancer.by_rank, strict=True)
        ]
    return moves


def noisy(*seconds: float, by: float = 0.1) -> Seconds:
    draw = random.Random(1)
    return lambda step, shares: [each * draw.uniform(1 - by, 1 + by) for each in seconds]


def test_a_slow_rank_gets_less_once_it_was_seen_for_some_steps() -> None:
    (move,) = played(Balancer(16, 4), 300, lambda step, shares: (0.1, 0.1, 0.1, 0.3))
    assert move == (
        WARM_UP + LATE + MEASURED,
        NewShares(by_rank=(5, 5, 5, 1), seconds=(0.1, 0.1, 0.1, 0.3), why=move[1].why),
    )
    assert (
        str(move[1])
        == "micro-batches by rank: 5, 5, 5, 1 (rank 3 takes 3.0x as long for one as rank 0)"
    )


def test_the_first_steps_and_one_that_was_held_up_say_nothing() -> None:
    def seconds(step: int, shares: tuple[int, ...]) -> Sequence[float]:
        return (9.0, 0.1) if step < WARM_UP or step % 7 == 0 else (0.1, 0.1)

    assert played(Balancer(8, 2), 200, seconds) == []


@pytest.mark.parametrize("seconds", [(0.1, 0.1, 0.1, 0.1), (0.1, 0.103, 0.098, 0.1)])
def test_noise_moves_nothing(seconds: tuple[float, ...]) -> None:
    for slots in (16, 64):
        assert played(Balancer(slots, 4), 2000, noisy(*seconds)) == []


def test_under_noise_a_slow_rank_is_found_and_shares_come_to_rest() -> None:
    balancer = Balancer(16, 4)
    moves = played(balancer, 2000, noisy(0.1, 0.1, 0.1, 0.3, by=0.15))
    assert 1 <= len(moves) <= 4
    assert moves[0][0] < 30
    # 0.5 is the best there is, and even shares take 1.2
    assert longest((0.1, 0.1, 0.1, 0.3), balancer.by_rank) <= 0.6


def test_shares_follow_a_rank_that_becomes_slow_and_fast_again() -> None:
    def seconds(step: int, shares: tuple[int, ...]) -> Sequence[float]:
        return (0.1, 0.2 if 100 <= step < 200 else 0.1)

    moves = played(Balancer(9, 2), 300, seconds)
    assert [moved.by_rank for _, moved in moves] == [(6, 3), (5, 4)]
    assert [100 < moves[0][0] < 125, 200 < moves[1][0] < 225] == [True, True]


def test_a_rank_may_get_nothing_and_is_tried_again_at_little_cost() -> None:
    spent = {"steps": 0.0}

    def seconds(step: int, shares: tuple[int, ...]) -> Sequence[float]:
        found = (0.1, 0.1, 2.0 if step < 5000 else 0.1)
        spent["steps"] += longest(found, shares) / 0.4 if step < 5000 else 0
        return found

    balancer = Balancer(8, 3)
    moves = played(balancer, 9000, seconds)
    assert [moved.by_rank for _, moved in moves[:3]] == [(4, 4, 0), (4, 3, 1), (4, 4, 0)]
    assert (
        str(moves[1][1])
        == "micro-batches by rank: 4, 3, 1 (rank 2 had none, and gets one to be measured again)"
    )
    assert moves[-1][1].by_rank == balancer.by_rank == (3, 3, 2), (
        "it is as fast as the others again"
    )
    assert spent["steps"] < 5000 * 1.04  # the first steps, until it was seen, among them


def test_of_more_ranks_than_micro_batches_an_idle_one_takes_over_from_a_slow_one() -> None:
    move, *_ = played(Balancer(2, 3), 20, lambda step, shares: (0.1, 0.4, 0.1))
    assert move[1].by_rank == (1, 0, 1)


def test_where_moves_do_not_bring_what_they_promise_they_become_rare() -> None:
    """Here a rank with more than an even share takes twice as long for each, as where ranks
    share a core: every move disappoints.
    """

    def seconds(step: int, shares: tuple[int, ...]) -> Sequence[float]:
        return [0.2 if count > 4 else 0.1 * (1 + rank / 3) for rank, count in enumerate(shares)]

    moves = played(Balancer(16, 4), 3000, seconds)
    tried, undone = [step for step, _ in moves[::2]], [step for step, _ in moves[1::2]]
    assert {moved.by_rank for _, moved in moves[1::2]} == {(4, 4, 4, 4)}
    assert (
        str(moves[1][1])
        == "micro-batches by rank: 4, 4, 4, 4 (unchanged: other shares did not make a step faster)"
    )
    assert {back - step for step, back in zip(tried, undone, strict=True)} == {LATE + MEASURED}
    assert [later - back for back, later in zip(undone, tried[1:], strict=False)][:6] == [
        10,
        20,
        40,
        80,
        160,
        320,
    ]


def test_all_ranks_decide_the_same() -> None:
    draw = random.Random(3)
    told = [[draw.uniform(0.1, 0.5) for _ in range(4)] for _ in range(300)]
    runs = [played(Balancer(13, 4), 300, lambda step, shares: told[step]) for _ in range(2)]
    assert runs[0] == runs[1]
    assert runs[0]


def test_two_steppers_of_one_window_are_added() -> None:
    balancer = Balancer(8, 2)
    for _ in range(40):
        balancer.begin()
        balancer.note((0.1, 0.1))
        balancer.note((0.0, 0.2))
    assert balancer.by_rank == (6, 2)


def test_a_window_asked_for_before_the_last_ones_step_is_refused() -> None:
    balancer = Balancer(8, 2)
    balancer.begin()
    with refused("window-before-step"):
        balancer.begin()
    balancer.leave()  # its epoch was left there
    balancer.begin()


def test_a_loader_of_other_ranks_than_the_step_is_refused() -> None:
    balancer = Balancer(8, 2)
    balancer.begin()
    with refused("balance-of-other-ranks", loader=2, step=3):
        balancer.note((0.1, 0.1, 0.1))


# -- shares ----------------------------------------------------------------------------------------


SECONDS = st.lists(
    st.sampled_from([0.1, 0.11, 0.15, 0.2, 0.3, 0.31, 1.0, 7.0]), min_size=1, max_size=5
)


def every(slots: int, size: int) -> Iterator[tuple[int, ...]]:
    """All ways to share out."""
    if size == 1:
        yield (slots,)
        return
    for first in range(slots + 1):
        yield from ((first, *rest) for rest in every(slots - first, size - 1))


@given(SECONDS, st.integers(1, 12))
def test_nobody_could_be_done_earlier(seconds: list[float], slots: int) -> None:
    found = quickest(seconds, slots)
    assert (len(found), sum(found)) == (len(seconds), slots)
    assert longest(seconds, found) == pytest.approx(
        min(longest(seconds, counts) for counts in every(slots, len(seconds)))
    )


@given(st.integers(1, 40), st.integers(1, 9), st.sampled_from([0.1, 0.3, 1.0, 1e-5, 123.0]))
def test_ranks_of_one_speed_share_as_always(slots: int, size: int, seconds: float) -> None:
    cut = Plan(samples=slots, global_batch=slots, micro_batch=1).cut(0)
    assert quickest([seconds] * size, slots) == tuple(
        len(cut.share(rank, size)) for rank in range(size)
    )


@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=60), st.integers(1, 5000))
def test_everything_is_shared_out_whatever_the_speeds(seconds: list[float], slots: int) -> None:
    found = quickest(seconds, slots)
    assert sum(found) == slots
    slowest = longest(seconds, found)
    assert all(
        (count + 1) * each >= slowest * (1 - 1e-9)
        for count, each in zip(found, seconds, strict=True)
    ), "one more here had been better"


def test_pictures() -> None:
    assert quickest([1, 1, 1, 3], 16) == (5, 5, 5, 1)
    assert quickest([1, 1, 1, 1], 16) == (4, 4, 4, 4)
    assert quickest([10, 1, 1], 8) == (0, 4, 4)  # nothing, where one alone would hold up the rest
    assert quickest([1, math.inf, 1], 5) == (3, 0, 2)
    assert in_proportion((2, 1, 1), 16) == (8, 4, 4)
    assert in_proportion((2, 1, 1), 5) == (3, 1, 1)
    assert in_proportion((0, 1), 4) == (0, 4)
    assert in_words((5, 5, 5, 1)) == "5, 5, 5, 1"
    assert in_words((2,) * 4 + (1,) + (3,) * 5) == "2 (ranks 0-3), 1 (rank 4), 3 (ranks 5-9)"
