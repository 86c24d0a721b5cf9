"""The largest of W draws: known values, and a draw of many."""

from __future__ import annotations

import math

import numpy as np
import pytest

from lockstep.tools.plan.simulate import expected_maximum


@pytest.mark.parametrize(
    ("draws", "expected"),
    [
        (1, 0.0),
        (2, 1 / math.sqrt(math.pi)),
        (3, 1.5 / math.sqrt(math.pi)),
        (10, 1.5387527308),
        (100, 2.5075936364),
    ],
)
def test_known_values(draws: int, expected: float) -> None:
    assert expected_maximum(draws) == pytest.approx(expected, abs=1e-6)


def test_what_is_drawn() -> None:
    drawn = np.random.default_rng(0).standard_normal((20_000, 64)).max(1)
    assert expected_maximum(64) == pytest.approx(drawn.mean(), abs=0.02)


def test_it_grows_as_the_root_of_the_logarithm() -> None:
    values = [expected_maximum(2**power) for power in range(17)]
    assert values == sorted(values)
    assert 0.9 < values[16] / math.sqrt(2 * math.log(65_536)) < 1
