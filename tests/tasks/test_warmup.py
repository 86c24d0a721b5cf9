"""Up in a straight line, down along a cosine, for any number of steps."""

from __future__ import annotations

import pytest

from lockstep.tasks.warmup import share_of_peak


@pytest.mark.parametrize("steps", [1, 2, 3, 7, 100])
@pytest.mark.parametrize("warmup", [0.0, 0.05, 0.25, 1.0])
def test_it_rises_then_falls_and_never_stands_still_at_nothing(steps: int, warmup: float) -> None:
    shares = [share_of_peak(step, steps=steps, warmup=warmup, floor=0.1) for step in range(steps)]
    peak = shares.index(max(shares))
    assert shares[: peak + 1] == sorted(shares[: peak + 1])
    assert shares[peak:] == sorted(shares[peak:], reverse=True)
    assert max(shares) == 1.0
    assert min(shares) > 0


def test_the_numbers() -> None:
    shares = [share_of_peak(step, steps=10, warmup=0.2, floor=0.0) for step in range(11)]
    assert shares[:2] == [0.5, 1.0]
    assert shares[5] == pytest.approx(0.5)
    assert shares[9] == shares[10] == pytest.approx(0.0)
