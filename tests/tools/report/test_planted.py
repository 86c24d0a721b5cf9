"""A delay of 200 ms in one phase of one rank is attributed to that rank and phase, whatever the
others do.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.tools.report.verdict import verdict
from tests.training.synthetic import anatomy, lines, noisy, planted


@settings(max_examples=15)
@given(data=st.data())
@pytest.mark.parametrize("phase", ["data", "forward", "backward", "optimizer", "moving", "other"])
def test_the_rank_and_the_phase_are_named(phase: str, data: st.DataObject) -> None:
    workers = data.draw(st.integers(3, 64), "workers")  # of two, half of a delay is each one's own
    who = data.draw(st.integers(0, workers - 1), "who")
    noise = noisy(data.draw(st.integers(0, 99), "seed"), data.draw(st.floats(0, 0.5), "noise"))
    made = lines(workers, 8, planted(who, phase), noise, lost=data.draw(st.booleans(), "lost"))
    found = verdict(anatomy(made))
    assert found is not None
    first = found.do_first

    assert (first.cause, first.rank, first.phase) == ("late", who, phase)


def test_a_delay_that_the_others_share_is_nobodys() -> None:
    found = verdict(
        anatomy(lines(4, 12, lambda rank, step, phase: 0.2 if phase == "forward" else 0.0))
    )
    assert found is not None
    assert found.shares["useful"] > 0.9
    assert found.do_first.cause == "nothing"
