"""A line through measured times."""

from __future__ import annotations

import pytest

from lockstep.tools.timing.hockney import fit


def test_points_on_a_line_are_found_again() -> None:
    found = fit([(6, bytes, 6 * 1e-4 + bytes * 1e-8) for bytes in (1e3, 1e5, 1e7)])
    assert (found.first, found.second, found.error) == pytest.approx((1e-4, 1e-8, 0), abs=1e-9)


def test_small_messages_count_as_much_as_large_ones() -> None:
    found = fit([(1, 1e1, 1.1e-4), (1, 1e2, 0.9e-4), (1, 1e9, 10.0)])
    assert found.first == pytest.approx(1e-4, rel=0.05)
    assert found.second == pytest.approx(1e-8, rel=0.01)
    assert found.error == pytest.approx(0.08, abs=0.02)


def test_neither_is_below_0() -> None:
    quicker = fit([(1, 1e6, 1.0), (1, 2e6, 3.0)])  # a straight line would begin below 0
    assert quicker.first == 0
    assert quicker.second > 0
    flat = fit([(1, 1e6, 3.0), (1, 2e6, 1.0)])
    assert flat.second == 0
    assert flat.first > 0
