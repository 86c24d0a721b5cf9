"""A delay of 200 ms in one phase of one rank is attributed to that rank and phase, whatever the
others do.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.tools.report.verdict import verdict
from tests.training.synthetic import BASE, anatomy, lines, noisy, planted

CAUSES = {
    "data": "data",
    "forward": "forward",
    "backward": "backward",
    "optimizer": "optimizer",
    "moving": "network",
    "other": "other",
}
WORDS = {
    "data": "loader",
    "forward": "forward",
    "backward": "backward",
    "optimizer": "optimizer",
    "moving": "network",
    "other": "own code",
}


@settings(max_examples=15)
@given(data=st.data())
@pytest.mark.parametrize("phase", CAUSES)
def test_the_rank_and_the_phase_are_named(phase: str, data: st.DataObject) -> None:
    workers = data.draw(st.integers(2, 64), "workers")
    who = data.draw(st.integers(0, workers - 1), "who")
    base = {each: data.draw(st.floats(0.0005, 0.15), each) for each in BASE}
    noise = noisy(
        data.draw(st.integers(0, 99), "seed"), data.draw(st.floats(0, 0.5), "noise"), base
    )
    made = lines(
        workers, 8, planted(who, phase), noise, base=base, lost=data.draw(st.booleans(), "lost")
    )
    found = verdict(anatomy(made))
    assert found is not None
    assert [(each.place, each.cause) for each in found.stragglers] == [(who, CAUSES[phase])]
    assert found.stragglers[0].mine - found.stragglers[0].others == pytest.approx(
        0.2, abs=0.5 * base[phase]
    )
    assert f"waiting for rank {who} (its {WORDS[phase]}" in found.reasons()[0]


@settings(max_examples=15)
@given(workers=st.integers(2, 16), noise=st.floats(0, 2), seed=st.integers(0, 999))
def test_nobody_is_named_who_is_not_slower(workers: int, noise: float, seed: int) -> None:
    found = verdict(anatomy(lines(workers, 60, noisy(seed, noise))))
    assert found is not None
    for each in found.stragglers:
        # noise may look like a rank, but never like one that is much behind
        assert each.mine < 1.2 * each.others
    assert len(found.stragglers) <= 1


def test_a_delay_that_the_others_share_is_nobodys() -> None:
    found = verdict(
        anatomy(lines(4, 12, lambda rank, step, phase: 0.2 if phase == "forward" else 0.0))
    )
    assert found is not None
    assert not found.stragglers


def test_who_happens_to_be_slowest_in_a_few_steps_is_not_named() -> None:
    """Steps that vary by 17 %: in 10 of them some rank's mean is some per cent above the
    others', without this rule in a third of the runs enough.
    """
    named = [
        found.stragglers
        for seed in range(30)
        if (found := verdict(anatomy(lines(4, 10, noisy(seed, 2.0)))))
    ]
    assert sum(map(bool, named)) <= 1
