"""Being asked to stop, on the launcher's side: who is told, who is ended, and with which exit
code.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from lockstep.launcher.stop import HANDLED, Stop, note_signals
from lockstep.runtime.failure_record import rank_file
from lockstep.runtime.preemption import HEEDS, asked_file

PIDS = {0: 100, 1: 101}
Sent = list[tuple[int, int]]


@pytest.fixture
def sent() -> Sent:
    """The signals that are sent, in place of sending them."""
    return []


@pytest.fixture
def stop(sent: Sent) -> Stop:
    return Stop(kill=lambda *signal_of: sent.append(signal_of))


def heeding(directory: Path, *ranks: int) -> None:
    for rank in ranks:
        rank_file(directory, rank, HEEDS).touch()


def test_ranks_that_heed_are_told_once_and_let_go_on(
    tmp_path: Path, stop: Stop, sent: Sent, capsys: pytest.CaptureFixture[str]
) -> None:
    heeding(tmp_path, 0, 1)
    assert not stop.now(tmp_path, PIDS)
    assert sent == []
    stop.note(signal.SIGTERM, None)
    assert [stop.now(tmp_path, PIDS) for _ in range(3)] == [False] * 3
    assert sent == [(100, signal.SIGUSR1), (101, signal.SIGUSR1)]
    line = "signal 15 (SIGTERM): stopping after this step; repeat it to stop at once\n"
    assert capsys.readouterr().err == line
    stop.note(signal.SIGTERM, None)
    assert stop.now(tmp_path, PIDS)
    assert stop.exit_code(saved=True) == 75
    assert stop.exit_code(saved=False) == 143


@pytest.mark.parametrize(
    ("number", "ranks", "code"), [(signal.SIGINT, [0], 130), (signal.SIGQUIT, [0, 1], 131)]
)
def test_ranks_that_do_not_heed_and_all_ranks_at_a_quit_are_ended(
    tmp_path: Path, stop: Stop, sent: Sent, number: int, ranks: list[int], code: int
) -> None:
    stop.note(number, None)
    heeding(tmp_path, *ranks)
    assert stop.now(tmp_path, PIDS)
    assert stop.now(tmp_path, {})
    assert sent == []
    assert stop.exit_code(saved=True) == code


def test_one_rank_that_is_asked_is_enough(tmp_path: Path, stop: Stop, sent: Sent) -> None:
    """Also while the others are not listening yet: they are waited for."""
    heeding(tmp_path, 1)
    asked_file(tmp_path).touch()
    assert not stop.now(tmp_path, PIDS)
    assert sent == []
    heeding(tmp_path, 0)
    assert not stop.now(tmp_path, PIDS)
    assert sent == [(100, signal.SIGUSR1), (101, signal.SIGUSR1)]


def test_a_rank_that_has_been_told_may_stop_heeding(tmp_path: Path, stop: Stop, sent: Sent) -> None:
    """Its world has closed, and it ends by itself."""
    heeding(tmp_path, 0, 1)
    asked_file(tmp_path).touch()
    assert not stop.now(tmp_path, PIDS)
    rank_file(tmp_path, 0, HEEDS).unlink()
    assert not stop.now(tmp_path, PIDS)
    assert len(sent) == 2


def test_handlers_are_put_back_and_what_was_ignored_stays_so() -> None:
    before = {number: signal.getsignal(number) for number in HANDLED}
    old = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with note_signals() as stop:
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            signal.raise_signal(signal.SIGUSR1)
        assert stop.number == signal.SIGUSR1
    finally:
        signal.signal(signal.SIGHUP, old)
    assert {number: signal.getsignal(number) for number in HANDLED} == before
