"""What rank 0 shows while training goes on: a live bar on a terminal, plain lines anywhere else.

All of it goes to stderr: stdout of `lockstep train` is its last line alone. The bar is redrawn by
`step` itself, at most ten times a second, so that it needs no thread.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any, Protocol, TextIO

from lockstep.launcher.logs import Tee

_REDRAW_SECONDS = 0.1
_LINE_SECONDS = 10.0


class Progress(Protocol):
    """Shows one training."""

    def say(self, line: str) -> None: ...
    def step(self, record: Mapping[str, Any]) -> None: ...
    def close(self) -> None: ...


def progress(steps: int | None, epochs: int | None) -> Progress:
    """For a training of that many optimizer steps (None: nobody knows): a bar if stderr is a
    terminal, else lines.
    """
    return Live(steps, epochs) if sys.stderr.isatty() else Plain(steps, epochs)


class Plain:
    """Lines, at most one every ten seconds besides what is said."""

    def __init__(self, steps: int | None, epochs: int | None, out: TextIO | None = None) -> None:
        """`out`: where they go; None: stderr."""
        self._steps, self._epochs, self._out = steps, epochs, out
        self._began = self._shown = time.monotonic()

    def say(self, line: str) -> None:
        print(line, file=self._out or sys.stderr, flush=True)

    def step(self, record: Mapping[str, Any]) -> None:
        now = time.monotonic()
        if now - self._shown >= _LINE_SECONDS:
            self._shown = now
            self.say(
                f"{where(record, self._steps, self._epochs)}:"
                f" {describe(record, self._steps, now - self._began)}"
            )

    def close(self) -> None:
        pass


class Live:
    """One line that is redrawn; what is said stands above it. A log that copies the terminal
    gets the plain lines in its place.
    """

    def __init__(self, steps: int | None, epochs: int | None) -> None:
        from rich.console import Console  # only on a terminal: it takes a while
        from rich.file_proxy import FileProxy
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as Bars

        self._steps, self._epochs = steps, epochs
        error = sys.stderr
        self._log = Plain(steps, epochs, error.copy) if isinstance(error, Tee) else None
        self._console = (
            Console(file=error.stream) if isinstance(error, Tee) else Console(stderr=True)
        )
        self._tees = [
            each for each in (sys.stdout, error) if isinstance(each, Tee) and each.isatty()
        ]
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.fields[state]}", markup=False),
        )
        # then rich has what others print stand above the bar, else it is done here, and copied
        theirs = self._log is None
        self._bars = Bars(
            *columns,
            console=self._console,
            auto_refresh=False,
            transient=True,
            redirect_stdout=theirs,
            redirect_stderr=theirs,
        )
        self._bar = self._bars.add_task("starting", total=steps, state="")
        self._began = time.monotonic()
        self._drawn = 0.0
        self._bars.start()
        for each in self._tees:
            each.stream = FileProxy(self._console, each.stream)

    def say(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)
        if self._log is not None:
            self._log.say(line)

    def step(self, record: Mapping[str, Any]) -> None:
        if self._log is not None:
            self._log.step(record)
        now = time.monotonic()
        if now - self._drawn < _REDRAW_SECONDS and record["step"] != self._steps:
            return
        self._drawn = now
        state = describe(record, self._steps, now - self._began)
        self._bars.update(
            self._bar,
            completed=record["step"],
            description=where(record, self._steps, self._epochs),
            state=state,
        )
        self._bars.refresh()

    def close(self) -> None:
        self._bars.stop()
        for each in self._tees:
            each.flush()
            each.stream = each.stream.rich_proxied_file


def of(done: int, total: int | None) -> str:
    """`3/12`, and `3` where nobody knows how many there are."""
    return f"{done}/{total}" if total is not None else str(done)


def where(record: Mapping[str, Any], steps: int | None, epochs: int | None) -> str:
    return f"epoch {of(record['epoch'], epochs)}, step {of(record['step'], steps)}"


def describe(record: Mapping[str, Any], steps: int | None, elapsed: float) -> str:
    """A step in a few words: "loss 0.1234, 5,210 samples/s, 12 s left", if the rest goes as what
    is done went in `elapsed` seconds.
    """
    done = record["step"]
    left = "" if steps is None else f", {clock((steps - done) * elapsed / done)} left"
    return f"loss {record['loss']:.4f}, {record['samples_per_s']:,.0f} samples/s{left}"


def clock(seconds: float) -> str:
    """12 s, 3:05, 2:03:05."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
