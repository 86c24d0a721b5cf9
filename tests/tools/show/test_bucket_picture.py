"""The picture of a step that really ran: moments in their order, and what is hidden."""

from __future__ import annotations

import pytest

from lockstep.tools.show.bucket_picture import (
    BucketMoments,
    RankMoments,
    RecordedStep,
    drawing,
    recorded,
    text,
    title,
)


def test_a_step_of_two_ranks() -> None:
    found = recorded(2, 3, "native")
    assert len(found.ranks) == 2
    for rank in found.ranks:
        spans = list(rank.spans.values())
        assert list(rank.spans) == ["forward", "backward", "wait for sums", "update"]
        assert [end for _, end in spans[1:-1]] == [begin for begin, _ in spans[2:]]
        assert len(rank.buckets) == len(rank.sizes) == 3
        assert sum(rank.sizes) >= 4 * 3 * (512 * 512 + 512)
        for each in rank.buckets:
            assert rank.spans["forward"][1] <= each.ready <= each.sent <= each.done
        assert max(each.ready for each in rank.buckets) <= rank.spans["backward"][1]
        assert [each.sent for each in rank.buckets] == sorted(each.sent for each in rank.buckets)
    assert text(found).startswith(f"{title(found)}\n")
    assert drawing(found).svg().count(">bucket ") == 2 * 3


def made_up() -> RecordedStep:
    """Seconds that can be counted on one's fingers: 2 of 3 seconds lie in the backward."""
    spans = {"forward": (10.0, 11.0), "backward": (11.0, 15.0), "update": (16.0, 17.0)}
    buckets = [BucketMoments(12.0, 12.0, 13.0), BucketMoments(13.0, 14.0, 16.0)]
    return RecordedStep([RankMoments(spans, buckets, [8, 8])], 2, "native")


def test_what_is_hidden() -> None:
    assert made_up().hidden(0) == pytest.approx(2 / 3)
    assert "67% of the communication hidden" in title(made_up())


def test_bars_lie_where_the_moments_are() -> None:
    rows = text(made_up()).splitlines()
    assert rows[-1].split() == [
        "rank",
        "0",
        "bucket",
        "1",
        "0.00",
        "MB",
        "3000.00",
        "4000.00",
        "6000.00",
    ]
