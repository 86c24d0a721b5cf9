"""Lists of numbers from users, checked: what is wrong is named with its place, and what is right
comes out in one form.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from lockstep.config.knob import whole
from lockstep.data.orders.numbers import digest, lengths, short, weights
from tests.refused import refused

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("value", [3, np.int64(3), np.uint8(3), torch.tensor(3)])
def test_whole_numbers_of_all_makes(value: Any) -> None:
    assert (whole("n", value), type(whole("n", value))) == (3, int)


@pytest.mark.parametrize(
    "values",
    [
        [1, 0, 4],
        (1.0, 0.0, 4.0),
        np.array([1, 0, 4], dtype=np.int32),
        torch.tensor([1.0, 0.0, 4.0]),
    ],
)
def test_weights_of_all_makes_are_scaled_to_the_largest(values: Any) -> None:
    found = weights(values)
    assert (found.dtype, found.tolist()) == (np.float64, [0.25, 0.0, 1.0])


@pytest.mark.parametrize("largest", [1.7e308, 5e-324])
def test_weights_at_the_ends_of_floating_point_can_be_summed(largest: float) -> None:
    found = weights([largest] * 1000)
    assert found.sum() == 1000.0


def test_the_given_list_is_left_alone() -> None:
    given = np.array([1.0, 2.0])
    weights(given)[:] = 7
    assert given.tolist() == [1.0, 2.0]
    whole_lengths = np.array([1, 2])
    lengths(whole_lengths, 1)[:] = 7
    assert whole_lengths.tolist() == [1, 2]


@pytest.mark.parametrize(
    ("given", "code", "values"),
    [
        ([1.0, -0.5, 2.0], "wrong-value", {"name": "weights[1]", "value": -0.5}),
        ([1.0, 2.0, NAN], "wrong-value", {"name": "weights[2]"}),
        ([INF, 1.0], "wrong-value", {"name": "weights[0]", "value": INF}),
        ([1.0, -INF, NAN], "wrong-value", {"name": "weights[1]", "value": -INF}),
        ([0.0, 0, 0], "weights-all-zero", {"count": 3}),
        ([], "not-a-list-of-numbers", {"name": "weights", "why": "there are none"}),
        ([[1.0, 2.0]], "not-a-list-of-numbers", {"why": "their shape is [1, 2]"}),
        (2.0, "not-a-list-of-numbers", {"why": "their shape is []"}),
        (
            ["much", 1],
            "not-a-list-of-numbers",
            {"why": "could not convert string to float: 'much'"},
        ),
    ],
)
def test_bad_weights_are_refused(given: Any, code: str, values: dict[str, Any]) -> None:
    with refused(code, **values):
        weights(given)


@pytest.mark.parametrize(
    "values", [[3, 0], np.array([3, 0], dtype=np.uint16), torch.tensor([3, 0])]
)
def test_lengths_of_all_makes(values: Any) -> None:
    found = lengths(values, 0)
    assert (found.dtype, found.tolist()) == (np.int64, [3, 0])


@pytest.mark.parametrize(
    ("given", "least", "code", "values"),
    [
        (
            [3, 0],
            1,
            "wrong-value",
            {"name": "lengths[1]", "value": 0, "expected": "a whole number of at least 1"},
        ),
        (
            [3, -1],
            0,
            "wrong-value",
            {"name": "lengths[1]", "value": -1, "expected": "a whole number of at least 0"},
        ),
        ([3.0, 2.0], 1, "not-a-list-of-numbers", {"why": "they are float64, not whole numbers"}),
        ([True, False], 0, "not-a-list-of-numbers", {"why": "they are bool, not whole numbers"}),
        ([], 1, "not-a-list-of-numbers", {"name": "lengths", "why": "there are none"}),
    ],
)
def test_bad_lengths_are_refused(given: Any, least: int, code: str, values: dict[str, Any]) -> None:
    with refused(code, **values):
        lengths(given, least)


def test_a_digest_tells_lists_apart_and_is_the_same_on_every_machine() -> None:
    # Recorded once: it is kept in checkpoints.
    assert short(np.array([1, 2, 3])) == digest(np.array([1, 2, 3]))[:16] == "e2e2033ae7e19d68"
    assert (
        digest(np.array([1, 2, 3], dtype=">i8"))
        == digest(np.arange(2, 8, 2) // 2)
        == digest(np.array([1, 2, 3]))
    )
    assert digest(np.array([1, 3, 2])) != digest(np.array([1, 2, 3])) != digest(np.array([1, 2]))
