"""Decisions without processes: every slot once, never beyond the bound, every window complete."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.data.window_loader import DynamicSlots, EpochCourse
from lockstep.updates.server.schedule import Schedule


class Run:
    """Ranks that do what the schedule says, in an order drawn by `choose`."""

    def __init__(self, ranks: int, bound: float, choose: random.Random) -> None:
        self.schedule, self.bound, self.choose = Schedule(ranks, bound), bound, choose
        self.ranks = ranks
        self.draws: dict[int, DynamicSlots | None] = dict.fromkeys(range(ranks))
        self.pushed: Counter[tuple[int, int]] = Counter()
        self.slots_of: Counter[int] = Counter()
        self.complete: list[int] = []
        self.synchronized: dict[int, list[DynamicSlots]] = {rank: [] for rank in range(ranks)}

    def epoch(self, course: EpochCourse, stop: int | None = None) -> None:
        """Until every rank knows of the epoch's end. `stop`: a rank asks to stop in this turn."""
        inside = set(range(self.ranks))
        for turn in range(1_000):
            if stop == turn:
                self.schedule.stop()
            self.turn(self.choose.choice(sorted(inside)), course, inside)
            if not inside:
                return
        raise AssertionError("no rank makes progress")

    def turn(self, rank: int, course: EpochCourse, inside: set[int]) -> None:
        draw, self.draws[rank] = self.draws[rank], None
        if draw is not None:
            step = course.first + draw.window
            self.pushed.update((step, slot) for slot in range(draw.first, draw.last))
            self.slots_of[rank] += draw.last - draw.first
            if self.schedule.pushed(draw):
                self.complete.append(step)
        work = self.schedule.next(rank, course)
        if work is None:
            return
        if work.last:
            self.draws[rank] = work
            open_windows = set(range(course.first + work.window)) - set(self.complete)
            oldest = min(open_windows, default=course.first + work.window)
            assert course.first + work.window - oldest <= self.bound
            return
        assert sorted(self.complete) == list(range(course.first + work.window))
        self.synchronized[rank].append(work)
        if work.over:
            inside.discard(rank)


@settings(max_examples=150, deadline=None)
@given(
    ranks=st.integers(1, 6),
    bound=st.sampled_from([0, 1, 3, math.inf]),
    windows=st.integers(1, 6),
    slots=st.integers(1, 9),
    last=st.integers(1, 9),
    seed=st.integers(0, 2**32),
    stop=st.one_of(st.none(), st.integers(1, 40)),
    limit=st.one_of(st.none(), st.integers(0, 12)),
)
def test_every_slot_counts_once(
    ranks: int,
    bound: float,
    windows: int,
    slots: int,
    last: int,
    seed: int,
    stop: int | None,
    limit: int | None,
) -> None:
    last = min(last, slots)
    run = Run(ranks, bound, random.Random(seed))
    if limit is not None:
        run.schedule.synchronize_before(limit)
    for epoch in range(2):
        course = EpochCourse(epoch, epoch * windows, 0, windows, slots, last)
        run.epoch(course, stop if epoch == 0 else None)
    expected = {
        (step, slot)
        for step in range(2 * windows)
        for slot in range(last if step % windows == windows - 1 else slots)
    }
    assert run.pushed == Counter(expected)
    assert sorted(run.complete) == list(range(2 * windows))
    for rank in range(ranks):  # all of them are told the same
        assert run.synchronized[rank] == run.synchronized[0]
    if limit is not None and 0 < limit < windows and stop is None:
        assert run.synchronized[0][0] == DynamicSlots(limit, 0, 0)
    if stop is None:
        assert not any(work.stop for work in run.synchronized[0])


def test_the_bound_is_in_windows() -> None:
    """Rank 1 keeps the first window open: with a bound of 2 rank 0 completes two more, and waits."""
    schedule, course = Schedule(2, 2), EpochCourse(0, 0, 0, 9, 2, 2)
    assert schedule.next(0, course) is None  # until all ranks are there
    slow = schedule.next(1, course)
    assert slow == DynamicSlots(0, 0, 1)
    windows = []
    work = schedule.next(0, course)
    while work is not None:
        windows.append(work.window)
        schedule.pushed(work)
        work = schedule.next(0, course)
    assert windows == [0, 1, 1, 2, 2]
    assert schedule.pushed(slow)
    assert schedule.next(0, course) == DynamicSlots(3, 0, 1)


def test_after_a_request_to_stop_windows_that_have_begun_are_completed() -> None:
    schedule, course = Schedule(1, 4), EpochCourse(0, 0, 0, 9, 3, 3)
    first = schedule.next(0, course)
    assert first == DynamicSlots(0, 0, 3)
    schedule.stop()
    assert schedule.next(0, course) is None
    assert schedule.pushed(first)
    assert schedule.next(0, course) == DynamicSlots(1, 0, 0, stop=True)
    # a rank that goes on gets the next window
    assert schedule.next(0, course) == DynamicSlots(1, 0, 3)


def test_a_step_that_is_over_is_no_reason_to_synchronize() -> None:
    """As after a resume: the first step at which a checkpoint was due lies before it."""
    schedule, course = Schedule(1, 4), EpochCourse(1, 5, 2, 5, 1, 1)
    for step in (3, 7, 8):
        schedule.synchronize_before(step)
    work = schedule.next(0, course)
    assert work == DynamicSlots(2, 0, 1)
    schedule.pushed(work)
    assert schedule.next(0, course) == DynamicSlots(3, 0, 0)


def test_ranks_that_walk_different_epochs_are_refused() -> None:
    schedule = Schedule(2, 0)
    schedule.next(0, EpochCourse(0, 0, 0, 3, 2, 2))
    with pytest.raises(ValueError, match="different epochs"):
        schedule.next(1, EpochCourse(0, 0, 0, 3, 2, 1))
