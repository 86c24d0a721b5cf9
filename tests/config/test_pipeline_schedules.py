"""Schedules: their names, the stages of a rank, what they can run, and torch's order as data."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.config.pipeline_schedules import NAMES, PipelineSchedule, StageWork
from lockstep.errors import UsageError
from tests.refused import refused

ALL = (*NAMES, "interleaved:3", "zero-bubble:2")


@pytest.mark.parametrize("name", ALL)
def test_a_schedule_is_written_as_it_is_read(name: str) -> None:
    assert str(PipelineSchedule.read(name)) == name


@pytest.mark.parametrize(
    ("text", "code", "values"),
    [
        ("1f2b", "unknown-choice", {"name": "schedule", "value": "1f2b", "choices": [*NAMES]}),
        ("gpipe:2", "one-stage-a-rank", {"name": "gpipe", "stages": "2"}),
        ("interleaved:1", "not-a-whole-number", {"name": "stages", "value": 1}),
        ("interleaved:two", "not-a-whole-number", {"value": "two"}),
        ("zero-bubble:0", "not-a-whole-number", {"expected": "a whole number of at least 1"}),
    ],
)
def test_what_is_no_schedule(text: str, code: str, values: dict[str, Any]) -> None:
    with refused(code, **values):
        PipelineSchedule.read(text)


def test_a_rank_holds_every_so_manieth_stage() -> None:
    assert list(PipelineSchedule.read("interleaved:3").stages_of(1, 4)) == [1, 5, 9]
    assert list(PipelineSchedule.read("1f1b").stages_of(2, 4)) == [2]


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(ALL), st.integers(1, 5), st.integers(1, 12))
def test_every_order_does_all_the_work_once_and_each_piece_after_what_it_continues(
    name: str, ranks: int, micro_batches: int
) -> None:
    schedule = PipelineSchedule.read(name)
    if schedule.why_not(ranks, micro_batches):
        with pytest.raises(UsageError):
            schedule.order(ranks, micro_batches)
        schedule = schedule.instead()
    for rank, order in enumerate(schedule.order(ranks, micro_batches)):
        assert len(set(order)) == len(order)
        at = {work: number for number, work in enumerate(order)}
        for stage in schedule.stages_of(rank, ranks):
            for each in range(micro_batches):
                if StageWork("B", stage, each) in at:
                    assert at[StageWork("F", stage, each)] < at.pop(StageWork("B", stage, each))
                else:
                    assert (
                        at[StageWork("F", stage, each)]
                        < at[StageWork("I", stage, each)]
                        < at[StageWork("W", stage, each)]
                    )
                    del at[StageWork("I", stage, each)], at[StageWork("W", stage, each)]
                del at[StageWork("F", stage, each)]
        assert not at


def test_1f1b_as_torch_has_it() -> None:
    orders = [" ".join(map(str, order)) for order in PipelineSchedule.read("1f1b").order(3, 4)]
    assert orders == [
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
        "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
    ]


def test_too_few_micro_batches_for_1f1b() -> None:
    with refused("schedule-does-not-fit", schedule="1f1b") as caught:
        PipelineSchedule.read("1f1b").order(4, 3)
    assert "3 micro-batches for 4 stages" in caught.value.values["reason"]


def test_rounds_that_are_not_equal() -> None:
    with refused("schedule-does-not-fit", schedule="interleaved") as caught:
        PipelineSchedule.read("interleaved").order(4, 9)
    assert "9 micro-batches on 4 ranks make 2 rounds" in caught.value.values["reason"]


def test_nothing_to_run() -> None:
    with refused("empty-pipeline", ranks=2, micro_batches=0):
        PipelineSchedule.read("gpipe").order(2, 0)
