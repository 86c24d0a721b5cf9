"""The status page: what is written is what another process reads, only the main thread writes,
and without a page nothing happens.
"""

from __future__ import annotations

import resource
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep.runtime import status


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Path]:
    status.open_page(tmp_path, 3)
    yield status.file_of(tmp_path, 3)
    status._page = None
    status.on_phase(None)
    status.step(0)


def seen(page: Path) -> status.View:
    view = status.read(page)
    assert view is not None
    return view


def test_what_is_noted_is_read(page: Path) -> None:
    assert page.stat().st_mode & 0o777 == 0o600
    view = seen(page)
    assert (view.phase, view.step, view.number) == ("start", 0, 0)
    assert (view.waits, view.collectives) == (False, {})
    status.step(7)
    before = time.monotonic_ns()
    assert status.enter("backward") == "start"
    for number in range(1, 21):
        status.collective(number, f"all_reduce {number}")
    view = seen(page)
    assert (view.phase, view.step, view.number) == ("backward", 7, 20)
    assert before <= view.since_ns <= time.monotonic_ns()
    assert view.collectives == {number: f"all_reduce {number}" for number in range(5, 21)}
    status.collective(21, "ä" * 500)
    assert set(seen(page).collectives[21].rstrip("\N{REPLACEMENT CHARACTER}")) == {"ä"}


def test_every_note_counts(page: Path) -> None:
    counts = [status.read_ticks(page)]
    for note in (
        lambda: status.step(1),
        lambda: status.enter("data"),
        lambda: status.enter("data"),
        lambda: status.collective(1, "x"),
        lambda: status.waits(True),
        lambda: status.waits(False),
    ):
        note()
        counts.append(status.read_ticks(page))
    assert counts == [counts[0] + more for more in range(7)]  # type: ignore[operator]


def test_phases_within_phases_and_what_each_has_taken(page: Path) -> None:
    with status.inside("evaluate"):
        with status.inside("data"):
            assert seen(page).phase == "data"
        assert seen(page).phase == "evaluate"
        with pytest.raises(ValueError, match="x"), status.inside("data"):
            raise ValueError("x")
        assert seen(page).phase == "data", "that is where it came from"
    view = seen(page)
    assert view.phase == "start"
    assert view.totals_ns["evaluate"] > 0
    assert view.totals_ns["data"] > 0
    assert view.totals_ns["backward"] == 0


def test_waiting_is_added_up(page: Path) -> None:
    status.waits(True)
    assert seen(page).waits
    assert not seen(page).messages
    assert seen(page).waited_ns == 0
    status.waits(False)
    view = seen(page)
    assert not view.waits
    assert view.waited_ns > 0


def test_other_threads_do_not_write(page: Path) -> None:
    before = page.read_bytes()

    def note() -> None:
        status.enter("data")
        status.collective(5, "x")
        status.waits(True)
        with status.inside("checkpoint"):
            pass

    thread = threading.Thread(target=note)
    thread.start()
    thread.join()
    assert page.read_bytes() == before


def test_without_a_page_nothing_is_noted_and_hooks_still_hear(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(status, "_page", None)
    monkeypatch.setattr(status, "_clock", None)  # an earlier test's training may have left its own
    heard: list[tuple[int, str]] = []
    status.on_phase(lambda step, phase: heard.append((step, phase)))
    try:
        status.step(2)
        assert not status.noted()
        assert status.enter("forward") == "loop"
        with status.inside("data"):
            status.collective(1, "x")
            status.waits(True)
    finally:
        status.on_phase(None)
        status.step(0)
    assert heard == [(2, "forward"), (2, "data")]


def test_half_a_page_is_none(tmp_path: Path) -> None:
    file = status.file_of(tmp_path, 0)
    assert (status.read(file), status.read_ticks(file)) == (None, None)
    file.write_bytes(b"\0" * 5)
    assert (status.read(file), status.read_ticks(file)) == (None, None)
    file.write_bytes(b"\xff" * 8192)
    assert status.read(file) is None


def test_a_page_that_finds_no_room_on_its_disk_is_an_error_and_no_signal(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(OSError, match=r"rank-0\.page"):
            status.Page(status.file_of(tmp_path, 0))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
