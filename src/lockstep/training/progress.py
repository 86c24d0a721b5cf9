"""What rank 0 shows of a training on stderr: a bar on a terminal, plain lines elsewhere, with the
same facts.

The bar is one row. `step` itself redraws it, at most five times a second, so no thread is needed
and the output of other processes stays readable. Facts that do not fit beside the bar take turns.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TextIO

from lockstep.checkpoints.folders import Stored
from lockstep.launcher.logs import Tee
from lockstep.runtime.disk import size_text
from lockstep.runtime.step_clock import StepTimes

_REDRAW_SECONDS = 0.2
_LINE_SECONDS = (10.0, 60.0)
_LINES_SHARE = 1 / 60
"""Share of the time since the start between two lines: 10 s at first, a minute after an hour."""
_TURN_SECONDS = 5.0
_MEMORY_SECONDS = 10.0
_BAR = (10, 40)
"""Minimum and maximum width of the bar, in columns."""
_SPARE = 5
"""Columns between the parts, and at the end, where a terminal writes the ^C of Ctrl-C."""


class ProgressFacts:
    """What is known of a training so far, in words. Costs a few microseconds a step."""

    def __init__(
        self,
        steps: int | None,
        epochs: int | None,
        *,
        starts: int = 0,
        stored: Callable[[], Stored | None] = lambda: None,
    ) -> None:
        """`steps` and `epochs`: how long the training is; None if unknown. `starts`: how often it
        was started before. `stored()`: the newest checkpoint, and the size of all.
        """
        self.steps = steps
        self._epochs = epochs
        self._starts = starts
        self._stored = stored
        self.record: Mapping[str, Any] = {}
        """The record of the latest step."""
        self._first: tuple[float, int] | None = None
        self._now = 0.0
        self._samples = 0.0
        self._seconds = 0.0
        self._exposed = 0.0
        self._timed = 0.0
        self.doing = ""
        """What the training does between two steps, if that may take long."""

    def step(self, record: Mapping[str, Any], times: Sequence[StepTimes]) -> None:
        """Take in one step's record, and the times of the steps that became known with it."""
        self.record = record
        self.doing = ""
        self._now = time.monotonic()
        self._first = self._first or (self._now, record["step"])
        samples = sum(record["samples_by_rank"])
        seconds = samples / max(record["samples_per_s"], 1e-9)
        fades = math.exp(-seconds / _MEMORY_SECONDS)
        self._samples = self._samples * fades + samples
        self._seconds = self._seconds * fades + seconds
        self._exposed = self._exposed * fades + sum(step.exposed for step in times)
        self._timed = self._timed * fades + sum(step.seconds for step in times)

    def position(self) -> str:
        """Return `epoch 2/12, step 30/276`."""
        if not self.record:
            return "before the first step"
        epoch = of(self.record["epoch"], self._epochs)
        step = of(self.record["step"], self.steps)
        return f"epoch {epoch}, step {step}"

    def all(self) -> list[str]:
        """Return the facts that are known, the most important first."""
        facts = [self.doing] if self.doing else []
        if not self.record:
            return facts
        left = self._left()
        if left is not None:
            facts.append(f"{clock(left)} left")
        facts.append(f"loss {self.record['loss']:.4f}")
        facts.append(f"{self._samples / max(self._seconds, 1e-9):,.0f} samples/s")
        if self._timed and len(self.record["samples_by_rank"]) > 1:
            facts.append(f"communication {100 * self._exposed / self._timed:.0f} %")
        stored = self._stored()
        if stored is not None:
            age = clock(max(0.0, time.time() - stored.written_at))
            facts.append(f"step {stored.step} saved {age} ago, {size_text(stored.bytes)} on disk")
        if self._starts:
            facts.append(f"started {self._starts + 1} times")
        return facts

    def _left(self) -> float | None:
        """Return the seconds to the end at the mean pace since this start; None if unknown."""
        done = int(self.record["step"])
        if self.steps is None or self._first is None:
            return None
        began, first = self._first
        if done == first:
            return None if done < self.steps else 0.0
        return (self.steps - done) * (self._now - began) / (done - first)


class Progress(Protocol):
    """Shows one training."""

    def print(self, line: str) -> None: ...
    def begin(self, activity: str) -> None: ...
    def step(self, record: Mapping[str, Any], times: Sequence[StepTimes]) -> None: ...
    def close(self) -> None: ...


def progress(facts: ProgressFacts) -> Progress:
    """Return a bar if stderr is a terminal that can redraw a row, else lines."""
    redraws = sys.stderr.isatty() and os.environ.get("TERM", "dumb") != "dumb"
    return ProgressBar(facts) if redraws else ProgressLines(facts)


class ProgressLines:
    """Lines: at most one every ten seconds, besides those of `print`."""

    def __init__(self, facts: ProgressFacts, out: TextIO | None = None) -> None:
        """`out`: where to print; None: stderr."""
        self._facts = facts
        self._out = out
        self._began = time.monotonic()
        self._shown = self._began

    def print(self, line: str) -> None:
        print(line, file=self._out or sys.stderr, flush=True)

    def begin(self, activity: str) -> None:
        """Show nothing: the line at its end is enough."""

    def step(self, record: Mapping[str, Any], times: Sequence[StepTimes]) -> None:
        self._facts.step(record, times)
        self.show()

    def show(self) -> None:
        """Print a line if one is due."""
        now = time.monotonic()
        if now - self._shown >= _line_seconds(now - self._began):
            self._shown = now
            self.print(f"{self._facts.position()}: {', '.join(self._facts.all())}")

    def close(self) -> None:
        pass


def _line_seconds(elapsed: float) -> float:
    """Return the seconds between two lines, `elapsed` seconds after the start: 10 at first, 60
    after an hour.
    """
    least, most = _LINE_SECONDS
    return min(most, max(least, _LINES_SHARE * elapsed))


class ProgressBar:
    """One row that is redrawn. Lines of `print` appear above it. A log that copies the terminal
    gets the plain lines instead.
    """

    def __init__(self, facts: ProgressFacts) -> None:
        from rich.console import Console  # imported only on a terminal: it takes a while
        from rich.file_proxy import FileProxy
        from rich.live import Live as Row

        class Terminal(Console):
            def show_cursor(self, show: bool = True) -> bool:
                return False  # a hidden cursor would stay hidden if this rank were killed

        self._facts = facts
        self._log: ProgressLines | None = None
        if isinstance(sys.stderr, Tee):
            self._log = ProgressLines(facts, sys.stderr.copy)
            self._console = Terminal(file=sys.stderr.stream)
        else:
            self._console = Terminal(stderr=True)
        streams = (sys.stdout, sys.stderr)
        self._tees = [stream for stream in streams if isinstance(stream, Tee) and stream.isatty()]
        # without a log rich puts other output above the bar, else it is done below and copied
        redirects = self._log is None
        self._began = time.monotonic()
        self._drawn = 0.0
        self._row = Row(
            console=self._console,
            auto_refresh=False,
            transient=True,
            redirect_stdout=redirects,
            redirect_stderr=redirects,
            get_renderable=self._drawing,
        )
        self._row.start(refresh=True)
        for tee in self._tees:
            tee.stream = FileProxy(self._console, tee.stream)

    def print(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)
        if self._log is not None:
            self._log.print(line)

    def begin(self, activity: str) -> None:
        self._facts.doing = activity
        self._row.refresh()

    def step(self, record: Mapping[str, Any], times: Sequence[StepTimes]) -> None:
        self._facts.step(record, times)
        if self._log is not None:
            self._log.show()
        now = time.monotonic()
        if now - self._drawn < _REDRAW_SECONDS and record["step"] != self._facts.steps:
            return
        self._drawn = now
        self._row.refresh()

    def close(self) -> None:
        self._row.stop()
        for tee in self._tees:
            tee.flush()
            tee.stream = tee.stream.rich_proxied_file

    def _drawing(self) -> Any:
        from rich.text import Text

        position = self._facts.position()
        steps = self._facts.steps
        least, most = _BAR
        room = self._console.width - len(position) - least - _SPARE
        pages = in_pages(self._facts.all(), room)
        turn = int((time.monotonic() - self._began) / _TURN_SECONDS)
        page = pages[turn % len(pages)]
        row = Text(position, no_wrap=True, overflow="ellipsis")
        if steps:
            unused = max(0, room - max(map(len, pages)))
            width = min(most, least + unused)
            done = width * self._facts.record.get("step", 0) // steps
            colourless = self._console.no_color or self._console.color_system is None
            rest = " " if colourless else "━"
            row.append(f" {'━' * done}", "bar.complete")
            row.append(rest * (width - done), "bar.back")
        return row.append(f" {page}")


def in_pages(facts: Sequence[str], width: int) -> list[str]:
    """Split the facts into as few rows of `width` columns as possible, at least one. No fact is
    split.
    """
    pages: list[str] = [""]
    for fact in facts:
        longer = f"{pages[-1]}, {fact}" if pages[-1] else fact
        if len(longer) <= width or not pages[-1]:
            pages[-1] = longer
        else:
            pages.append(fact)
    return pages


def of(done: int, total: int | None) -> str:
    """Return `3/12`, or `3` if the total is unknown."""
    return f"{done}/{total}" if total is not None else str(done)


def clock(seconds: float) -> str:
    """Return a time as text: 12 s, 3:05, 2:03:05."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02}:{rest:02}"
    return f"{minutes}:{rest:02}" if minutes else f"{rest} s"
