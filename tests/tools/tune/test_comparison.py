"""Faster means faster by more than what the machine's noise would explain."""

from __future__ import annotations

import pytest

from lockstep.tools.tune.comparison import PairedTimes


@pytest.mark.parametrize(
    ("base", "candidate", "faster"),
    [
        ([1.0, 1.0, 1.0], [0.9, 0.9, 0.9], True),
        ([1.0, 1.0, 1.0], [1.0, 1.0, 1.0], False),
        ([1.0, 1.0, 1.0], [0.995, 0.995, 0.995], False),  # less than a per cent
        ([1.0, 1.0, 1.0, 1.0], [0.5, 1.4, 0.6, 1.2], False),  # the median is 0.9, and says nothing
        ([1.0, 5.0, 1.0, 5.0], [0.9, 4.5, 0.9, 4.5], True),  # what slows both is no noise
        ([1.0, 1.0, 1.0], [1.2, 1.2, 1.2], False),
    ],
)
def test_pairs_decide(base: list[float], candidate: list[float], faster: bool) -> None:
    assert PairedTimes.of(base, candidate).faster == faster


def test_the_figures() -> None:
    found = PairedTimes.of([2.0, 4.0, 6.0, 8.0, 10.0], [1.0, 2.0, 3.0, 4.0, 5.0])
    assert (found.turns, found.base, found.base_p25, found.candidate, found.candidate_p25) == (
        5,
        6.0,
        4.0,
        3.0,
        2.0,
    )
    assert (found.ratio, found.noise) == (0.5, 0.0)


def test_more_turns_have_less_noise() -> None:
    few, many = (
        PairedTimes.of([1.0] * 4 * times, [0.8, 0.9, 1.0, 0.9] * times) for times in (1, 25)
    )
    assert few.noise == pytest.approx(5 * many.noise)
    assert (few.faster, many.faster) == (True, True)
