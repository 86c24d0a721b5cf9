"""Lists of numbers from users, checked: what is wrong is named with its place, and what is right
comes out in one form.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from lockstep.data.orders.numbers import digest, lengths, short, weights, whole
from lockstep.errors import UsageError

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("value", [3, np.int64(3), np.uint8(3), torch.tensor(3)])
def test_whole_numbers_of_all_makes(value: Any) -> None:
    assert (whole("n", value), type(whole("n", value))) == (3, int)


@pytest.mark.parametrize(
    ("value", "least", "message"),
    [
        (0, 1, "n=0: give a whole number, 1 or more"),
        (-1, 0, "n=-1: give a whole number, 0 or more"),
        (2.0, 1, "n=2.0: give a whole number, 1 or more"),
        (True, 1, "n=True: give a whole number, 1 or more"),
        ("3", 1, "n='3': give a whole number, 1 or more"),
        (None, 1, "n=None: give a whole number, 1 or more"),
    ],
)
def test_what_is_no_whole_number_is_refused(value: Any, least: int, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        whole("n", value, least)
    assert str(caught.value) == message


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
    ("values", "message"),
    [
        ([1.0, -0.5, 2.0], "weights[1]=-0.5: a weight is finite and not negative"),
        ([1.0, 2.0, NAN], "weights[2]=nan: a weight is finite and not negative"),
        ([INF, 1.0], "weights[0]=inf: a weight is finite and not negative"),
        ([1.0, -INF, NAN], "weights[1]=-inf: a weight is finite and not negative"),
        ([0.0, 0, 0], "all 3 weights are 0: there is nothing to draw"),
        ([], "weights are empty: give one number each"),
        ([[1.0, 2.0]], "weights of shape [1, 2]: give a list, one number each"),
        (2.0, "weights of shape []: give a list, one number each"),
        (
            ["much", 1],
            "weights are not a list of numbers: could not convert string to float: 'much'",
        ),
    ],
)
def test_bad_weights_are_refused(values: Any, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        weights(values)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    "values", [[3, 0], np.array([3, 0], dtype=np.uint16), torch.tensor([3, 0])]
)
def test_lengths_of_all_makes(values: Any) -> None:
    found = lengths(values, 0)
    assert (found.dtype, found.tolist()) == (np.int64, [3, 0])


@pytest.mark.parametrize(
    ("values", "least", "message"),
    [
        ([3, 0], 1, "lengths[1]=0: a length is at least 1"),
        ([3, -1], 0, "lengths[1]=-1: a length is at least 0"),
        ([3.0, 2.0], 1, "lengths are float64, not whole numbers: give integers"),
        ([True, False], 0, "lengths are bool, not whole numbers: give integers"),
        ([], 1, "lengths are empty: give one number each"),
    ],
)
def test_bad_lengths_are_refused(values: Any, least: int, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        lengths(values, least)
    assert str(caught.value) == message


def test_a_digest_tells_lists_apart_and_is_the_same_on_every_machine() -> None:
    # Recorded once: it is kept in checkpoints.
    assert short(np.array([1, 2, 3])) == digest(np.array([1, 2, 3]))[:16] == "e2e2033ae7e19d68"
    assert (
        digest(np.array([1, 2, 3], dtype=">i8"))
        == digest(np.arange(2, 8, 2) // 2)
        == digest(np.array([1, 2, 3]))
    )
    assert digest(np.array([1, 3, 2])) != digest(np.array([1, 2, 3])) != digest(np.array([1, 2]))
