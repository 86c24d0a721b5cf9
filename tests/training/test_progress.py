"""A bar on a terminal, lines elsewhere, and nothing on stdout."""

from __future__ import annotations

import io
import sys
from typing import Any

import pytest

from lockstep.launcher.logs import Tee
from lockstep.training import journal
from lockstep.training.journal import Live, Plain, clock, describe


def record(step: int) -> dict[str, Any]:
    return {"step": step, "epoch": 1 + (step - 1) // 10, "loss": 0.123456, "samples_per_s": 5210.4}


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Clock:
    now = Clock()
    monkeypatch.setattr(journal.time, "monotonic", now)
    return now


def test_plain_lines_at_most_every_ten_seconds(
    time: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = journal.progress(20, 2)
    assert isinstance(shown, Plain)
    for step in range(1, 21):
        time.now += 3
        shown.step(record(step))
    shown.say("epoch 1/2: accuracy [0.9]")
    shown.close()
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "epoch 1/2, step 4/20: loss 0.1235, 5,210 samples/s, 48 s left",
        "epoch 1/2, step 8/20: loss 0.1235, 5,210 samples/s, 36 s left",
        "epoch 2/2, step 12/20: loss 0.1235, 5,210 samples/s, 24 s left",
        "epoch 2/2, step 16/20: loss 0.1235, 5,210 samples/s, 12 s left",
        "epoch 2/2, step 20/20: loss 0.1235, 5,210 samples/s, 0 s left",
        "epoch 1/2: accuracy [0.9]",
    ]


def test_a_terminal_gets_a_bar_and_lines_above_it(
    time: Clock, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    stderr = sys.stderr
    shown = journal.progress(20, 2)
    assert isinstance(shown, Live)
    for step in range(1, 21):
        time.now += 1
        shown.step(record(step))
    shown.say("epoch 1/2: accuracy [0.9] " + "long " * 30)
    shown.close()
    assert sys.stderr is stderr
    out, err = capsys.readouterr()
    assert out == ""
    assert "loss 0.1235, 5,210 samples/s, 10 s left" in err
    assert "epoch 2/2, step 20/20" in err
    assert "accuracy [0.9] " + "long " * 29 in err


def test_a_log_beside_the_terminal_has_the_plain_lines_and_what_others_print(
    time: Clock, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: False)
    monkeypatch.setenv("TERM", "xterm")
    terminal, log = sys.stderr, io.StringIO()
    monkeypatch.setattr(sys, "stderr", Tee(terminal, log))
    monkeypatch.setattr(sys, "stdout", Tee(sys.stdout, log))
    shown = journal.progress(20, 2)
    assert isinstance(shown, Live)
    for step in range(1, 21):
        time.now += 6
        shown.step(record(step))
    shown.say("epoch 1/2: accuracy [0.9]")
    print("from the task", file=sys.stderr)
    print("to a file")
    shown.close()
    print("after it", file=sys.stderr)
    lines = log.getvalue().splitlines()
    assert [line.partition(":")[0] for line in lines] == [
        *(f"epoch {1 + step // 11}/2, step {step}/20" for step in range(2, 21, 2)),
        "epoch 1/2",
        "from the task",
        "to a file",
        "after it",
    ]
    out, err = capsys.readouterr()
    assert out == "to a file\n"
    assert "step 20/20" in err
    assert err.endswith("after it\n")
    assert "from the task" in err


def test_the_bar_is_not_redrawn_more_often_than_it_can_be_seen(
    time: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    shown = Live(1000, 1)
    drawn = []
    monkeypatch.setattr(shown._bars, "refresh", lambda: drawn.append(time.now))
    for step in range(1, 1001):
        time.now += 0.001
        shown.step(record(step))
    shown.close()
    assert 8 <= len(drawn) <= 13


def test_times() -> None:
    assert [clock(seconds) for seconds in (0.4, 59.4, 185, 7385)] == [
        "0 s",
        "59 s",
        "3:05",
        "2:03:05",
    ]
    assert describe(record(5), 20, 10.0).endswith("samples/s, 30 s left")
    assert describe(record(5), None, 10.0).endswith("samples/s")
