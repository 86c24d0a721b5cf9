"""Schedules: their names, the stages of a rank, what they can run, and torch's order as data."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.config.pipeline_schedules import NAMES, Schedule, Work
from lockstep.errors import UsageError

ALL = (*NAMES, "interleaved:3", "zero-bubble:2")


@pytest.mark.parametrize("name", ALL)
def test_a_schedule_is_written_as_it_is_read(name: str) -> None:
    assert str(Schedule.read(name)) == name


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "1f2b",
            (
                "schedule='1f2b' is unknown: choose one of naive, gpipe, 1f1b, interleaved,"
                " zero-bubble"
            ),
        ),
        ("gpipe:2", "in gpipe a rank holds one stage; write gpipe, or interleaved:2"),
        ("interleaved:1", "'1' is no number of stages a rank; give a whole number of at least 2"),
        ("interleaved:two", "'two' is no number of stages a rank"),
        ("zero-bubble:0", "at least 1"),
    ],
)
def test_what_is_no_schedule(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Schedule.read(text)


def test_a_rank_holds_every_so_manieth_stage() -> None:
    assert list(Schedule.read("interleaved:3").stages_of(1, 4)) == [1, 5, 9]
    assert list(Schedule.read("1f1b").stages_of(2, 4)) == [2]


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(ALL), st.integers(1, 5), st.integers(1, 12))
def test_every_order_does_all_the_work_once_and_each_piece_after_what_it_continues(
    name: str, ranks: int, micro_batches: int
) -> None:
    schedule = Schedule.read(name)
    if schedule.why_not(ranks, micro_batches):
        with pytest.raises(UsageError):
            schedule.order(ranks, micro_batches)
        schedule = schedule.instead()
    for rank, order in enumerate(schedule.order(ranks, micro_batches)):
        assert len(set(order)) == len(order)
        at = {work: number for number, work in enumerate(order)}
        for stage in schedule.stages_of(rank, ranks):
            for each in range(micro_batches):
                if Work("B", stage, each) in at:
                    assert at[Work("F", stage, each)] < at.pop(Work("B", stage, each))
                else:
                    assert (
                        at[Work("F", stage, each)]
                        < at[Work("I", stage, each)]
                        < at[Work("W", stage, each)]
                    )
                    del at[Work("I", stage, each)], at[Work("W", stage, each)]
                del at[Work("F", stage, each)]
        assert not at


def test_1f1b_as_torch_has_it() -> None:
    orders = [" ".join(map(str, order)) for order in Schedule.read("1f1b").order(3, 4)]
    assert orders == [
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
        "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
    ]


def test_too_few_micro_batches_for_1f1b() -> None:
    with pytest.raises(
        UsageError,
        match=(
            "3 micro-batches for 4 stages: 1f1b needs at least as many micro-batches as stages; or"
            " choose gpipe"
        ),
    ):
        Schedule.read("1f1b").order(4, 3)


def test_rounds_that_are_not_equal() -> None:
    with pytest.raises(
        UsageError,
        match=(
            "9 micro-batches on 4 ranks make 2 rounds, and 9 is no multiple of 2: interleaved needs"
            " equal rounds"
        ),
    ):
        Schedule.read("interleaved").order(4, 9)


def test_nothing_to_run() -> None:
    with pytest.raises(UsageError, match="0 micro-batches"):
        Schedule.read("gpipe").order(2, 0)
