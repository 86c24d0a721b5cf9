"""The queue on the link, in seconds that can be counted on one's fingers."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.tools.plan.communication import GatheredLayers, QueuedBucket, replicated, sharded


@pytest.mark.parametrize(
    ("buckets", "arrived"),
    [
        ([], 14),
        ([QueuedBucket(1.0, 3, 0)], 17),  # one bucket, complete at the end: nothing is hidden
        ([QueuedBucket(0.5, 3, 0)], 14),  # there before the end
        ([QueuedBucket(0.5, 3, 0), QueuedBucket(1.0, 1, 0)], 15),  # the last one alone is exposed
        # the second waits its turn
        ([QueuedBucket(0.5, 9, 0), QueuedBucket(0.6, 2, 0)], 9 + 9 + 2),
        ([QueuedBucket(0.0, 1, 4)], 18),  # what is late begins at the end
        # and behind what is still under way
        ([QueuedBucket(0.5, 9, 2), QueuedBucket(1.0, 1, 3)], 9 + 9 + 1 + 5),
    ],
)
def test_when_the_last_gradient_has_arrived(buckets: list[QueuedBucket], arrived: float) -> None:
    ended = replicated(4, 10, buckets)
    assert (ended.computed, ended.arrived) == (14, arrived)
    assert ended.busy == sum(bucket.early + bucket.late for bucket in buckets)


seconds = st.floats(0, 10)


@given(st.lists(st.tuples(st.floats(0, 1), seconds, seconds), max_size=6), seconds, seconds)
def test_no_sooner_than_either_and_no_later_than_both(
    found: list[tuple[float, float, float]], before: float, backward: float
) -> None:
    buckets = [QueuedBucket(ready, early, late) for (ready, early, late) in sorted(found)]
    ended = replicated(before, backward, buckets)
    link = sum(bucket.early + bucket.late for bucket in buckets)
    assert max(ended.computed, link) - 1e-9 <= ended.arrived <= ended.computed + link + 1e-9


def test_sharded_layers_without_a_link_take_what_they_compute() -> None:
    groups = [GatheredLayers(0.5, 0, 0), GatheredLayers(0.9, 0, 0)]
    assert sharded(2, 4, 3, groups).arrived == pytest.approx(18)


def test_the_first_layer_of_all_is_waited_for_and_the_next_is_fetched_meanwhile() -> None:
    # Forward: gather B 1 | B 5 (A gathered) | A 5; backward: A 10 (B gathered again) | B 10; scatter B 2, with A's hidden behind B.
    groups = [GatheredLayers(0.5, 1, 2), GatheredLayers(1.0, 1, 2)]
    ended = sharded(10, 20, 1, groups)
    assert (ended.computed, ended.arrived) == (31, 33)
    assert ended.busy == 3 * 1 + 2 * 2  # A stays between forward and backward


def test_a_slow_link_is_what_is_left() -> None:
    groups = [GatheredLayers(0.5, 100, 200), GatheredLayers(1.0, 100, 200)]
    ended = sharded(1, 2, 1, groups)
    assert ended.arrived == pytest.approx(700 + 0.5, abs=0.51)
    assert ended.arrived >= ended.busy


@given(
    st.integers(1, 4),
    st.lists(st.tuples(seconds, seconds), min_size=1, max_size=5),
    st.floats(0.1, 10),
    st.floats(0.1, 10),
)
def test_a_sharded_step_is_never_quicker_than_its_parts(
    count: int, links: list[tuple[float, float]], forward: float, backward: float
) -> None:
    groups = [GatheredLayers((place + 1) / len(links), *link) for place, link in enumerate(links)]
    ended = sharded(forward, backward, count, groups)
    computation = count * (forward + backward)
    assert ended.arrived >= max(computation, ended.busy) - 1e-9
    assert ended.arrived <= computation + ended.busy + 1e-9
    assert not math.isnan(ended.arrived)
