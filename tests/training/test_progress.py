"""A bar on a terminal, lines elsewhere, the same facts, and nothing on stdout."""

from __future__ import annotations

import io
import sys
from typing import Any

import pytest

from lockstep.checkpoints.folders import Stored
from lockstep.launcher.logs import Tee
from lockstep.runtime.step_clock import StepTimes
from lockstep.training import progress
from lockstep.training.progress import (
    Progress,
    ProgressBar,
    ProgressFacts,
    ProgressLines,
    clock,
    in_pages,
)


def record(step: int) -> dict[str, Any]:
    speed = {"samples_by_rank": [32, 32], "samples_per_s": 5210.4}
    return {"step": step, "epoch": 1 + (step - 1) // 10, "loss": 0.123456, **speed}


def times(step: int, waits: float = 0.25) -> list[StepTimes]:
    """A second."""
    rest = {"data": 0.0, "backward": 0.0, "optimizer": 0.0, "checks": 0.0, "other": 0.0}
    return [StepTimes(step=step, forward=1 - waits, moving=0.0, waits=waits, **rest)]


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Clock:
    now = Clock()
    monkeypatch.setattr(progress.time, "monotonic", now)
    monkeypatch.setattr(progress.time, "time", now)
    return now


def be_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make stderr one, of 80 columns."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")


def train(shown: Progress, time: Clock, seconds: float, steps: int = 20) -> None:
    """Show so many steps, of so many seconds each."""
    for step in range(1, steps + 1):
        time.now += seconds
        shown.step(record(step), times(step))


def test_plain_lines_at_most_every_ten_seconds_also_on_a_terminal_that_cannot_redraw(
    time: Clock, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    be_a_terminal(monkeypatch)
    monkeypatch.setenv("TERM", "dumb")
    shown = progress.progress(ProgressFacts(20, 2))
    assert isinstance(shown, ProgressLines)
    train(shown, time, 3)
    shown.print("epoch 1/2: accuracy [0.9]")
    shown.close()
    out, err = capsys.readouterr()
    assert out == ""
    *steps, last = err.splitlines()
    assert steps == [
        f"epoch {1 + step // 11}/2, step {step}/20: {60 - 3 * step} s left, loss 0.1235,"
        " 5,210 samples/s, communication 25 %"
        for step in (4, 8, 12, 16, 20)
    ]
    assert last == "epoch 1/2: accuracy [0.9]"


def test_a_terminal_gets_a_bar_and_lines_above_it(
    time: Clock, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    be_a_terminal(monkeypatch)
    stderr = sys.stderr
    shown = progress.progress(ProgressFacts(2000, 2))
    assert isinstance(shown, ProgressBar)
    train(shown, time, 0.01, steps=2000)
    shown.print("epoch 1/2: accuracy [0.9] " + "long " * 30)
    shown.close()
    assert sys.stderr is stderr
    out, err = capsys.readouterr()
    assert out == ""
    assert "18 s left, loss 0.1235, 5,210 samples/s" in err
    assert "communication 25 %" in err  # in its turn: a row of 80 columns does not hold it, too
    assert "\x1b[?25l" not in err  # a rank that is killed would leave the cursor hidden
    assert "step 2000/2000" in err
    assert 80 < err.count("/2000") < 110  # five times a second
    assert "accuracy [0.9] " + "long " * 29 in err


def test_a_log_beside_the_terminal_has_the_plain_lines_and_what_others_print(
    time: Clock, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    be_a_terminal(monkeypatch)
    log = io.StringIO()
    monkeypatch.setattr(sys, "stderr", Tee(sys.stderr, log))
    monkeypatch.setattr(sys, "stdout", Tee(sys.stdout, log))
    shown = progress.progress(ProgressFacts(20, 2))
    assert isinstance(shown, ProgressBar)
    train(shown, time, 6)
    shown.print("epoch 1/2: accuracy [0.9]")
    print("from the task", file=sys.stderr)
    print("to a file")
    shown.close()
    print("after it", file=sys.stderr)
    *steps, said, task, to_file, after = log.getvalue().splitlines()
    assert [line.partition(":")[0] for line in steps] == [
        f"epoch {1 + step // 11}/2, step {step}/20" for step in range(2, 21, 2)
    ]
    assert said.partition(":")[0] == "epoch 1/2"
    assert (task, to_file, after) == ("from the task", "to a file", "after it")
    out, err = capsys.readouterr()
    assert out == "to a file\n"
    assert "step 20/20" in err
    assert err.endswith("after it\n")
    assert "from the task" in err


def test_what_is_left_saved_restarted_and_done_between_steps(time: Clock) -> None:
    facts = ProgressFacts(300, None, starts=2, stored=lambda: Stored(80, time.now - 65, 3_000_000))
    assert facts.all() == []
    facts.step(record(101), times(101))
    assert facts.position() == "epoch 11, step 101/300"
    assert facts.all()[-2:] == ["step 80 saved 1:05 ago, 2.9 MiB on disk", "started 3 times"]
    assert not any("left" in fact for fact in facts.all())
    for step in range(102, 201):
        time.now += 2
        facts.step(record(step), times(step))
    assert facts.all()[0] == "3:20 left"
    facts.doing = "evaluating"
    assert facts.all()[0] == "evaluating"
    facts.step(record(201), times(201))
    assert "evaluating" not in facts.all()


def test_one_worker_does_not_communicate_and_the_share_follows_what_changes(time: Clock) -> None:
    def share(facts: ProgressFacts) -> list[str]:
        return [fact for fact in facts.all() if fact.startswith("communication")]

    facts = ProgressFacts(None, None)
    facts.step({**record(1), "samples_by_rank": [64]}, times(1))
    assert share(facts) == []
    for waits in (0.25, 0.75):
        for step in range(1, 9000):
            facts.step(record(step), times(step, waits))
        assert share(facts) == [f"communication {100 * waits:.0f} %"]


def test_facts_that_do_not_fit_take_turns() -> None:
    facts = ["12 s left", "loss 0.1", "9 samples/s", "1 restart"]
    assert in_pages(facts, 100) == [", ".join(facts)]
    assert in_pages(facts, 20) == ["12 s left, loss 0.1", "9 samples/s", "1 restart"]
    assert in_pages(facts, 1) == facts
    assert in_pages([], 20) == [""]


def test_the_bar_is_one_row_whatever_the_width(
    time: Clock, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    be_a_terminal(monkeypatch)
    for width in (20, 40, 80, 200):
        monkeypatch.setenv("COLUMNS", str(width))
        shown = progress.progress(
            ProgressFacts(20, 2, starts=1, stored=lambda: Stored(1, 100.0, 500))
        )
        train(shown, time, 1)
        shown.close()
        # the cursor goes up a row once, when the bar is removed
        assert capsys.readouterr().err.count("\x1b[1A") == 1, width


def test_durations() -> None:
    durations = {0.4: "0 s", 59.4: "59 s", 185: "3:05", 7385: "2:03:05"}
    assert {seconds: clock(seconds) for seconds in durations} == durations
