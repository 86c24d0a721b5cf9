"""How much of the communication went on behind the backward, by a clock that the test moves on."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import pytest

from lockstep.gradients.bucket import BucketTimeline


class Time:
    def __init__(self) -> None:
        self.now = 0.0

    def monotonic_ns(self) -> int:
        return round(self.now * 1e9)


@dataclass
class Goes:
    """On its way by itself, there at `at`."""

    time: Time
    at: float

    def wait(self, timeout: timedelta | None = None) -> None: ...

    def done(self) -> bool:
        return self.time.now >= self.at


class Begins:
    """Only when it is waited for."""

    def wait(self, timeout: timedelta | None = None) -> None: ...


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    time = Time()
    monkeypatch.setattr("lockstep.gradients.bucket.time", time)
    return time


def test_what_travels_while_the_backward_goes_on_is_hidden_and_overlaps_count_once(
    time: Time,
) -> None:
    timeline = BucketTimeline()
    for now, arrives in ((1.0, 3.0), (2.0, 4.0), (6.0, 9.0)):
        time.now = now
        timeline.note_arrivals()
        timeline.launched(Goes(time, arrives))
    for now in (3.0, 4.0, 5.0):  # the looks of gradients that land meanwhile
        time.now = now
        timeline.note_arrivals()
    time.now = 8.0
    timeline.backward_is_over()
    timeline.launched(Goes(time, 10.0))
    for number, now in enumerate((8.0, 8.0, 9.0, 10.0)):
        time.now = now
        timeline.waited_for(number)
    times = [(bucket.left, bucket.arrived) for bucket in timeline.times()]
    assert times == [(1.0, 6.0), (2.0, 6.0), (6.0, 9.0), (8.0, 10.0)]
    assert timeline.hidden() == pytest.approx(7.0)  # from 1 to 8: the looks came late, at 6


def test_a_look_in_time_says_when_a_sum_was_there(time: Time) -> None:
    timeline = BucketTimeline()
    time.now = 1.0
    timeline.launched(Goes(time, 2.0))
    timeline.launched(Goes(time, 3.0))
    for now in (1.5, 2.0, 2.5, 3.0):
        time.now = now
        timeline.note_arrivals()
    time.now = 5.0
    timeline.backward_is_over()
    assert [bucket.arrived for bucket in timeline.times()] == [2.0, 3.0]
    assert timeline.hidden() == pytest.approx(2.0)


@pytest.mark.parametrize("backward", [True, False])
def test_nothing_is_hidden_of_what_begins_when_it_is_waited_for(time: Time, backward: bool) -> None:
    """Nor in a window without a backward."""
    timeline = BucketTimeline()
    time.now = 1.0
    if backward:
        timeline.launched(Begins())
        time.now = 5.0
    timeline.backward_is_over()
    if not backward:
        timeline.launched(Goes(time, 3.0))
    time.now = 7.0
    timeline.waited_for(0)
    assert timeline.hidden() == 0.0
    assert [(bucket.left, bucket.arrived) for bucket in timeline.times()] == [(1.0, 7.0)]
