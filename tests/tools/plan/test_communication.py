"""The queue on the link, in seconds that can be counted on one's fingers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.collectives.network import Network
from lockstep.tools.plan.communication import QueuedBucket, TalkingRanks, replicated


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


def test_a_small_message_is_by_recursive_doubling_and_a_larger_one_in_a_ring() -> None:
    ranks = TalkingRanks(16, Network.flat(1.0, 1.0))
    assert ranks.small(1e-3) == pytest.approx(4 + 4e-3)  # log2 16 rounds of all
    assert ranks.small(1e6) == pytest.approx(30 + 2 * 15 / 16 * 1e6)  # 30 rounds of a sixteenth
    assert TalkingRanks(16, Network.flat(1.0, 1.0), software=9.0).small(1e-3) == pytest.approx(
        9 + 4e-3
    )
