"""Decisions without processes: every slot once, never beyond the bound, every window applied,
whoever is slow, dies or asks to stop.
"""

from __future__ import annotations

import math
import random
from collections import Counter as Count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.updates.server.counter import (
    Apply,
    Counter,
    Draw,
    EpochCourse,
    Pushed,
    Synchronize,
    WindowDone,
)


def pushed(draw: Draw, version: int = 0) -> Pushed:
    return Pushed(
        draw,
        weight=draw.last - draw.first,
        loss=1.0,
        samples=draw.last - draw.first,
        version=version,
    )


class Run:
    """Ranks that do what the counter says, in an order drawn by `choose`. `after` every rank's
    answers stay what it has to do.
    """

    def __init__(self, ranks: int, bound: float, choose: random.Random) -> None:
        self.counter, self.bound, self.choose = Counter(ranks, bound), bound, choose
        self.ranks = ranks
        self.doing: dict[int, Draw | Apply | None] = dict.fromkeys(range(ranks))
        self.version_of: dict[int, int] = {}
        self.computed: Count[tuple[int, int]] = Count()
        self.applied: list[WindowDone] = []
        self.begun: set[int] = set()
        self.met: dict[int, list[Synchronize]] = {rank: [] for rank in range(ranks)}

    def epoch(
        self, course: EpochCourse, dying: dict[int, int] | None = None, stop: int | None = None
    ) -> None:
        """Until every living rank has heard of the epoch's end. `dying`: rank -> after so many
        turns; `stop`: somebody asks in this turn.
        """
        inside, turn = set(self.counter.living), 0
        while inside:
            turn += 1
            assert turn < 1_000, "nobody gets on"
            for rank, when in (dying or {}).items():
                if turn == when and len(self.counter.living) > 1 and rank in self.counter.living:
                    self.counter.died(rank)
                    inside.discard(rank)
            if stop == turn:
                self.counter.ask_to_stop()
            if inside:
                self.turn(self.choose.choice(sorted(inside)), course, inside)

    def turn(self, rank: int, course: EpochCourse, inside: set[int]) -> None:
        work, self.doing[rank] = self.doing[rank], None
        if isinstance(work, Draw):
            self.counter.pushed(rank, pushed(work, self.version_of[rank]))
            self.computed.update(
                (course.first + work.place, slot) for slot in range(work.first, work.last)
            )
        elif isinstance(work, Apply):
            self.applied.append(self.counter.applied(rank))
        answer = self.counter.next(rank, course)
        if isinstance(answer, Synchronize):
            self.met[rank].append(answer)
            if answer.over:
                inside.discard(rank)
        elif answer is not None:
            self.doing[rank] = answer
            if isinstance(answer, Draw):
                self.version_of[rank] = self.counter.version
                self.begun.add(course.first + answer.place)
                oldest = min((n for n in self.begun if n not in self.done(course)), default=0)
                assert course.first + answer.place - oldest <= self.bound

    def done(self, course: EpochCourse) -> set[int]:
        return (
            {course.first + each.place for each in self.applied}
            if course.first == 0
            else self._all_done(course)
        )

    def _all_done(self, course: EpochCourse) -> set[int]:
        return set(range(course.first)) | {
            course.first + each.place for each in self.applied[course.first :]
        }


@settings(max_examples=150, deadline=None)
@given(
    ranks=st.integers(1, 6),
    bound=st.sampled_from([0, 1, 3, math.inf]),
    windows=st.integers(1, 6),
    slots=st.integers(1, 9),
    last=st.integers(1, 9),
    seed=st.integers(0, 2**32),
    deaths=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 60)), max_size=3),
    stop=st.one_of(st.none(), st.integers(1, 40)),
    meeting=st.one_of(st.none(), st.integers(0, 12)),
)
def test_every_slot_counts_once(
    ranks: int,
    bound: float,
    windows: int,
    slots: int,
    last: int,
    seed: int,
    deaths: list[tuple[int, int]],
    stop: int | None,
    meeting: int | None,
) -> None:
    last = min(last, slots)
    run = Run(ranks, bound, random.Random(seed))
    if meeting is not None:
        run.counter.synchronize_before(meeting)
    for epoch in range(2):
        course = EpochCourse(epoch, epoch * windows, 0, windows, slots, last)
        run.epoch(
            course,
            {rank: turn for rank, turn in deaths if rank < ranks} if epoch == 0 else None,
            stop if epoch == 0 else None,
        )
    expected = {
        (window, slot)
        for window in range(2 * windows)
        for slot in range(last if window % windows == windows - 1 else slots)
    }
    # what a dead rank had pushed counts; what it had not, somebody else computed
    assert run.computed == Count(expected)
    assert sorted(each.place for each in run.applied) == sorted(list(range(windows)) * 2)
    assert sum(sum(each.samples_by_rank) for each in run.applied) == len(expected)
    for rank in run.counter.living:  # all of them hear of the same meetings
        assert run.met[rank] == run.met[0]
    if meeting is not None and 0 < meeting < windows and stop is None:
        assert run.met[0][0].place == meeting


def test_a_straggler_takes_fewer() -> None:
    """One is asked once in ten turns."""
    run = Run(4, math.inf, random.Random(0))
    course, inside = EpochCourse(0, 0, 0, 50, 4, 4), {0, 1, 2, 3}
    for turn in range(150):
        run.turn(3 if turn % 20 == 0 else turn % 3, course, inside)
    taken = [sum(each.samples_by_rank[rank] for each in run.applied) for rank in range(4)]
    assert min(taken[:3]) > 4 * taken[3] > 0


def test_the_bound_is_in_windows() -> None:
    """Rank 1 keeps the first window open: with a bound of 2 rank 0 may finish two more, and then
    waits.
    """
    counter, course = Counter(2, 2), EpochCourse(0, 0, 0, 9, 2, 2)
    assert counter.next(0, course) is None  # until all ranks are there
    first = counter.next(1, course)
    assert first == Draw(0, 0, 2, 0, 1)
    places = []
    answer = counter.next(0, course)
    while answer is not None:
        if isinstance(answer, Draw):
            places.append(answer.place)
            counter.pushed(0, pushed(answer))
        else:
            counter.applied(0)
        answer = counter.next(0, course)
    assert places == [0, 1, 1, 2, 2]
    assert isinstance(first, Draw)
    counter.pushed(1, pushed(first))
    assert isinstance(counter.next(1, course), Apply)
    assert counter.next(0, course) is None
    counter.applied(1)
    assert counter.next(0, course) == Draw(3, 0, 2, 0, 1)


def test_age_counts_what_was_applied_since_the_pull() -> None:
    counter, course = Counter(2, math.inf), EpochCourse(0, 0, 0, 3, 1, 1)
    counter.next(0, course)
    old = counter.next(1, course)
    ages = []
    for _ in range(2):
        draw = counter.next(0, course)
        assert isinstance(draw, Draw)
        counter.pushed(0, pushed(draw, counter.version))
        assert isinstance(counter.next(0, course), Apply)
        ages.append(counter.applied(0).age)
    assert isinstance(old, Draw)
    counter.pushed(1, pushed(old, 0))
    counter.next(1, course)
    assert [*ages, counter.applied(1).age] == [0, 0, 2]


def test_what_a_dead_rank_was_to_apply_is_applied_by_another() -> None:
    counter, course = Counter(2, 0), EpochCourse(0, 0, 0, 1, 1, 1)
    counter.next(0, course)
    draw = counter.next(1, course)
    assert isinstance(draw, Draw)
    counter.pushed(1, pushed(draw))
    assert isinstance(counter.next(1, course), Apply)
    assert counter.next(0, course) is None
    counter.died(1)
    assert isinstance(counter.next(0, course), Apply)
    counter.applied(0)
    met = counter.next(0, course)
    assert isinstance(met, Synchronize)
    assert (met.living, met.over) == ((0,), True)


def test_ranks_that_walk_different_epochs_are_told() -> None:
    counter = Counter(2, 0)
    counter.next(0, EpochCourse(0, 0, 0, 3, 2, 2))
    with pytest.raises(ValueError, match="different epochs"):
        counter.next(1, EpochCourse(0, 0, 0, 3, 2, 1))
