"""Schedules: what they can run, their bubbles, and torch's order as data."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.errors import UsageError
from lockstep.model_parallel.schedules import NAMES, StageWork, bubble, fits, order
from tests.refused import refused


def test_what_cannot_be_run_is_refused() -> None:
    with refused("unknown-choice", name="schedule", value="1f2b", choices=[*NAMES]):
        order("1f2b", 2, 2)
    with refused("schedule-does-not-fit", schedule="1f1b", ranks=4, micro_batches=3):
        order("1f1b", 4, 3)
    with refused("empty-pipeline", ranks=2, micro_batches=0):
        order("gpipe", 2, 0)


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(NAMES), st.integers(1, 5), st.integers(1, 12))
def test_every_order_does_all_the_work_once_and_each_backward_after_its_forward(
    schedule: str, ranks: int, micro_batches: int
) -> None:
    if not fits(schedule, ranks, micro_batches):
        with pytest.raises(UsageError):
            order(schedule, ranks, micro_batches)
        return
    for rank, work in enumerate(order(schedule, ranks, micro_batches)):
        at = {piece: number for number, piece in enumerate(work)}
        assert len(at) == len(work) == 2 * micro_batches
        for number in range(micro_batches):
            assert at[StageWork("F", rank, number)] < at[StageWork("B", rank, number)]


def test_1f1b_as_torch_has_it() -> None:
    orders = [" ".join(map(str, work)) for work in order("1f1b", 3, 4)]
    assert orders == [
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
        "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
    ]


def test_bubbles_are_the_textbooks() -> None:
    assert bubble("naive", 4, 8) == 3 / 4
    assert bubble("gpipe", 4, 8) == bubble("1f1b", 4, 8) == 3 / 11
    assert bubble("1f1b", 1, 8) == 0
