"""Where a step's time went: phases, waits within them, and a device that runs behind the host."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pytest

from lockstep.runtime import status
from lockstep.runtime.step_clock import PhaseSpan, StepClock, StepTimes


class Time:
    """A clock that a test moves on."""

    def __init__(self) -> None:
        self.now = 10 * 10**9

    def monotonic_ns(self) -> int:
        return self.now

    def pass_(self, milliseconds: int) -> None:
        self.now += milliseconds * 10**6


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    clock = Time()
    for module in ("lockstep.runtime.step_clock", "lockstep.runtime.status"):
        monkeypatch.setattr(f"{module}.time", clock)
    return clock


@pytest.fixture
def clock(time: Time) -> StepClock:
    found = StepClock()
    status.open_clock(found)
    return found


def walk(time: Time) -> None:
    """One step with something in every phase."""
    for phase, milliseconds in (("data", 3), ("forward", 5), ("backward", 7), ("reduce", 2)):
        status.enter(phase)
        time.pass_(milliseconds)
    status.waits(True)
    time.pass_(11)
    status.waits(False)
    time.pass_(1)
    status.enter("optimizer")
    time.pass_(13)
    with status.inside("checks"):
        time.pass_(17)
    time.pass_(1)
    with status.inside("evaluate"):
        time.pass_(100)
        status.waits(True)
        time.pass_(50)
        status.waits(False)
    status.enter("loop")
    time.pass_(19)


def test_every_phase_gets_its_own_time_and_waits_are_apart(time: Time, clock: StepClock) -> None:
    walk(time)
    clock.end(4, hidden=0.006)
    (found,) = clock.finished()
    host = {"data": 0.003, "forward": 0.005, "backward": 0.007, "optimizer": 0.014, "other": 0.019}
    apart = {"moving": 0.003, "waits": 0.011, "hidden": 0.006, "checks": 0.017, "evaluate": 0.15}
    assert found == StepTimes(step=4, **host, **apart)
    assert found.seconds == pytest.approx(0.079)
    assert found.exposed == pytest.approx(0.014)
    assert clock.finished() == []


def test_the_next_step_begins_where_one_ends(time: Time, clock: StepClock) -> None:
    walk(time)
    clock.end(1)
    time.pass_(4)  # in the user's loop
    status.enter("data")
    time.pass_(2)
    clock.end(2)
    first, second = clock.finished()
    assert (first.step, second.step) == (1, 2)
    assert (second.other, second.data, second.seconds) == (0.004, 0.002, 0.006)


def _milliseconds(spans: Sequence[PhaseSpan], since: float) -> list[tuple[str, bool, int, int]]:
    """Phase, whether it waits, begin and end of each span, since that second."""
    rows = []
    for span in spans:
        begin, end = (round(1000 * (moment - since)) for moment in (span.begin, span.end))
        rows.append((span.phase, span.waits, begin, end))
    return rows


def test_spans_say_where_each_piece_lies_and_only_where_they_are_asked_for(
    time: Time, clock: StepClock
) -> None:
    walk(time)
    clock.end(1, spans=True)
    status.enter("forward")
    time.pass_(5)
    status.enter("forward")  # the next micro-batch: still one piece
    time.pass_(5)
    status.enter("reduce")
    time.pass_(1)
    status.waits(True)
    time.pass_(2)
    status.waits(False)
    clock.end(2)
    first, second = clock.finished()
    assert first.spans == ()
    pieces = _milliseconds(second.spans, second.spans[0].begin)
    assert [piece for piece in pieces if piece[2] != piece[3]] == [
        ("forward", False, 0, 10),
        ("reduce", False, 10, 11),
        ("reduce", True, 11, 13),
    ]
    assert isinstance(second.spans[0], PhaseSpan)


def test_what_another_stepper_did_meanwhile_is_not_ours(time: Time, clock: StepClock) -> None:
    clock.end(1)
    other = StepClock()
    status.open_clock(other)
    status.enter("forward")
    time.pass_(40)
    other.end(1)
    status.open_clock(clock)
    status.enter("backward")
    time.pass_(2)
    clock.end(2)
    _, second = clock.finished()
    assert second.seconds == pytest.approx(0.002)
    assert other.finished()[0].forward == pytest.approx(0.04)


def test_threads_of_libraries_are_not_heard(time: Time, clock: StepClock) -> None:
    status.enter("backward")
    thread = threading.Thread(target=lambda: (status.waits(True), status.enter("optimizer")))
    thread.start()
    thread.join()
    time.pass_(9)
    clock.end(1)
    assert clock.finished()[0].backward == pytest.approx(0.009)


def test_a_wait_that_an_exception_broke_off_ends_with_its_step(
    time: Time, clock: StepClock
) -> None:
    status.enter("reduce")
    status.waits(True)  # and PeerFailed is raised: nobody says that it is over
    clock.begin()
    status.enter("forward")
    time.pass_(5)
    status.waits(False)
    clock.end(1)
    (found,) = clock.finished()
    assert (found.forward, found.waits) == (0.005, 0.0)


@dataclass
class Stream:
    """A device that comes to its events when the test says so, each 10 ms after the one before."""

    events: list[Mark] = field(default_factory=list)
    done: int = 0

    def event(self) -> Mark:
        self.events.append(Mark(self, len(self.events)))
        return self.events[-1]


@dataclass
class Mark:
    stream: Stream
    place: int

    def query(self) -> bool:
        return self.place < self.stream.done

    def elapsed_time(self, end: Mark) -> float:
        assert self.query()
        assert end.query()
        return 10.0 * (end.place - self.place)


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    """No clock hears the next test."""
    yield
    status._clock = None


def opened(stream: Stream) -> StepClock:
    """A device's clock that hears the phases."""
    clock = StepClock(stream.event)
    status.open_clock(clock)
    return clock


def test_on_a_device_a_step_is_known_when_its_work_is_done(time: Time) -> None:
    stream = Stream()
    clock = opened(stream)
    for step in (1, 2):
        for phase in ("forward", "backward", "reduce"):
            status.enter(phase)
        status.waits(True)
        status.waits(False)
        status.enter("optimizer")
        clock.end(step, hidden=None)
        assert clock.finished() == []
    stream.done = len(stream.events) // 2
    (first,) = clock.finished()
    assert (first.step, first.hidden) == (1, None)
    assert (first.forward, first.backward, first.optimizer) == (0.01, 0.01, 0.01)
    assert (first.moving, first.waits) == (0.02, 0.01)
    assert clock.finished() == []
    stream.done = len(stream.events)
    assert [each.step for each in clock.finished()] == [2]


def test_on_a_device_spans_are_the_devices(time: Time) -> None:
    stream = Stream()
    clock = opened(stream)
    clock.begin(spans=True)
    began = time.monotonic_ns() / 1e9
    for phase in ("forward", "backward"):
        status.enter(phase)
    clock.end(1)
    clock.end(2)
    stream.done = len(stream.events)
    first, second = clock.finished()
    assert _milliseconds(first.spans, began) == [
        ("loop", False, 0, 10),
        ("forward", False, 10, 20),
        ("backward", False, 20, 30),
    ]
    assert second.spans == ()


def test_where_no_step_ends_marks_do_not_pile_up(time: Time) -> None:
    stream = Stream()
    clock = opened(stream)
    for _ in range(20_000):
        status.enter("forward")
    assert len(stream.events) <= 10_001
    clock.end(1)
    status.enter("forward")
    clock.end(2)
    stream.done = len(stream.events)
    assert [each.step for each in clock.finished()] == [2]


def test_pauses_since_the_last_step_are_known(time: Time, clock: StepClock) -> None:
    status.enter("evaluate")
    time.pass_(3)
    clock.end(1)
    status.enter("loop")
    time.pass_(1)
    with status.inside("checkpoint"):
        time.pass_(5)
    assert clock.paused() == {"checkpoint": pytest.approx(0.005), "evaluate": 0.0}
