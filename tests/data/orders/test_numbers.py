"""Lists of numbers from users, checked: what is wrong is named with its place, and what is right
comes out in one form.
"""

from __future__ import annotations

import numpy as np
import torch

from lockstep.config.knob import whole
from lockstep.data.orders.numbers import digest, lengths, short, weights
from tests.refused import refused

NAN, INF = float("nan"), float("inf")


def test_numbers_of_all_makes() -> None:
    """Weights are scaled to the largest."""
    for number in (3, np.int64(3), np.uint8(3), torch.tensor(3)):
        assert (whole("n", number), type(whole("n", number))) == (3, int)
    for given in (
        [1, 0, 4],
        (1.0, 0.0, 4.0),
        np.array([1, 0, 4], dtype=np.int32),
        torch.tensor([1.0, 0.0, 4.0]),
    ):
        scaled = weights(given)
        assert (scaled.dtype, scaled.tolist()) == (np.float64, [0.25, 0.0, 1.0])
    for unscaled in ([3, 0], np.array([3, 0], dtype=np.uint16), torch.tensor([3, 0])):
        taken = lengths(unscaled, 0)
        assert (taken.dtype, taken.tolist()) == (np.int64, [3, 0])


def test_weights_at_the_ends_of_floating_point_can_be_summed() -> None:
    for largest in (1.7e308, 5e-324):
        assert weights([largest] * 1000).sum() == 1000.0


def test_the_given_list_is_left_alone() -> None:
    given = np.array([1.0, 2.0])
    weights(given)[:] = 7
    assert given.tolist() == [1.0, 2.0]
    whole_lengths = np.array([1, 2])
    lengths(whole_lengths, 1)[:] = 7
    assert whole_lengths.tolist() == [1, 2]


def test_bad_weights_are_refused() -> None:
    for given, index in (
        ([1.0, -0.5, 2.0], 1),
        ([1.0, 2.0, NAN], 2),
        ([INF, 1.0], 0),
        ([1.0, -INF, NAN], 1),
    ):
        with refused("wrong-value", name=f"weights[{index}]"):
            weights(given)
    with refused("weights-all-zero", count=3):
        weights([0.0, 0, 0])
    for unfit, why in (
        ([], "there are none"),
        ([[1.0, 2.0]], "their shape is [1, 2]"),
        (2.0, "their shape is []"),
        (["much", 1], "could not convert string to float: 'much'"),
    ):
        with refused("not-a-list-of-numbers", name="weights", why=why):
            weights(unfit)


def test_bad_lengths_are_refused() -> None:
    for given, least in (([3, 0], 1), ([3, -1], 0)):
        expected = f"a whole number of at least {least}"
        with refused("wrong-value", name="lengths[1]", value=given[1], expected=expected):
            lengths(given, least)
    for unfit, why in (
        ([3.0, 2.0], "they are float64, not whole numbers"),
        ([True, False], "they are bool, not whole numbers"),
        ([], "there are none"),
    ):
        with refused("not-a-list-of-numbers", name="lengths", why=why):
            lengths(unfit, 1)


def test_a_digest_tells_lists_apart_and_is_the_same_on_every_machine() -> None:
    # Recorded once: it is kept in checkpoints.
    assert short(np.array([1, 2, 3])) == digest(np.array([1, 2, 3]))[:16] == "e2e2033ae7e19d68"
    assert (
        digest(np.array([1, 2, 3], dtype=">i8"))
        == digest(np.arange(2, 8, 2) // 2)
        == digest(np.array([1, 2, 3]))
    )
    assert digest(np.array([1, 3, 2])) != digest(np.array([1, 2, 3])) != digest(np.array([1, 2]))
