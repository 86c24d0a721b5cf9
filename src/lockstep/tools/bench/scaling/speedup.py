"""Computes speedup and efficiency at each number of workers from the rates of all rounds. Makes a
table, a picture, and remarks that warn of misleading figures.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from lockstep.data.windows import counted
from lockstep.tools.bench.scaling.works import Mode
from lockstep.tools.drawing import FAINT
from lockstep.tools.svg import Plot, figure
from lockstep.tools.timing.output_files import percent, table

_WIDTH = 120
_COLOURS: dict[Mode, str] = {"strong": "var(--blue)", "weak": "var(--orange)"}
_BEYOND = "var(--grey)"
_HEAD = (
    "workers | threads | ms a step | samples/s | lower quarter | upper | speedup | efficiency"
    " | predicted"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ScalingRow:
    """The row of one number of workers in one mode."""

    mode: Mode
    workers: int
    samples_per_s: float
    """Samples per second of all ranks together, median over the rounds."""
    low: float
    high: float
    """Quartiles of `samples_per_s` over the rounds."""
    speedup: float
    """`samples_per_s` divided by that of the base: the first number of workers of the mode."""
    efficiency: float
    """`speedup` divided by the ratio of `workers` to the base's workers."""
    predicted_efficiency: float
    """Efficiency predicted from one rank's work, measured alone, and the link (prediction.py)."""
    threads: int
    """Intra-op threads of each rank."""
    step_ms: float
    """Milliseconds of a step, median over the rounds."""

    def cells(self) -> list[str]:
        rates = [f"{rate:,.0f}" for rate in (self.samples_per_s, self.low, self.high)]
        shares = [percent(self.efficiency), percent(self.predicted_efficiency)]
        return [
            str(self.workers),
            str(self.threads),
            f"{self.step_ms:.2f}",
            *rates,
            f"{self.speedup:.2f}",
            *shares,
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Scaling:
    """The result of `lockstep.benchmark_scaling`: `rows`, and what they were measured on.
    `describe()` gives the table.
    """

    task: str
    rows: Sequence[ScalingRow]
    modes: Mapping[Mode, str]
    """For each mode, what stays the same, in words."""
    where: str
    """The machine, in words."""
    how: str
    """Steps, rounds and what is timed, in words."""
    remarks: Sequence[str]
    """Sentences that warn of misleading figures."""
    cores: int
    device: str

    def describe(self) -> str:
        """Return a table for each mode and the remarks, as the command prints them."""
        lines = [f"{self.task} on {self.where}", self.how]
        for mode, words in self.modes.items():
            lines += [
                "",
                words,
                table(_HEAD, [row.cells() for row in self.rows if row.mode == mode], left=()),
            ]
        if self.remarks:
            lines += [
                "",
                *(textwrap.fill(remark, _WIDTH, subsequent_indent="  ") for remark in self.remarks),
            ]
        return "\n".join(lines)

    def plot(self, file: Path | str) -> None:
        """Draw speedup and efficiency over workers into an SVG file: ideal, measured with
        quartiles, and predicted. Raises UsageError if it cannot be written.
        """
        panels = [self._panel(what) for what in ("speedup", "efficiency")]
        figure(f"{self.task} on {self.where}", panels, self.describe()).save(file)

    def _panel(self, what: str) -> Plot:
        counts = sorted({row.workers for row in self.rows})
        base = self.rows[0].workers
        ideal = [count / base if what == "speedup" else 1.0 for count in counts]
        names = {"ideal": FAINT}
        for mode in self.modes:
            names |= {
                f"{mode}, measured": _COLOURS[mode],
                f"{mode}, predicted (dots)": _COLOURS[mode],
            }
        beyond = self.device == "cpu" and max(counts) > self.cores
        if beyond:
            names[f"more ranks than the {counted(self.cores, 'core')}"] = _BEYOND
        plot = Plot(
            (counts[0], counts[-1]),
            "workers",
            up=(0.0, max([*ideal, *(end for row in self.rows for end in _quartiles(row, what))])),
            legend=names if what == "speedup" else None,
            numbers={count: str(count) for count in counts},
            title=f"{what}, base: {counted(base, 'worker')}",
        )
        if beyond:
            plot.stripe(max(self.cores, counts[0]), max(counts), _BEYOND)
        plot.curve(zip(counts, ideal, strict=True), FAINT, dashes="5 4")
        for mode in self.modes:
            rows = sorted(
                (row for row in self.rows if row.mode == mode), key=lambda row: row.workers
            )
            _draw(plot, rows, what)
        return plot

    def as_json(self) -> dict[str, Any]:
        """Return plain data: numbers, strings, lists and dicts."""
        return asdict(self) | {
            "rows": [asdict(row) for row in self.rows],
            "modes": dict(self.modes),
            "remarks": list(self.remarks),
        }


def efficiency(speedup: float, workers: int, base: int) -> float:
    """Return the speedup divided by the ideal one, `workers / base`."""
    return speedup / (workers / base)


def rows(
    mode: Mode,
    turns: Mapping[int, Sequence[tuple[int, float]]],
    predicted: Mapping[int, float],
    threads: Mapping[int, int],
    steps: int,
) -> list[ScalingRow]:
    """Return a row for each number of workers, in the order of `turns`; the first is the base.

    `turns`: samples and seconds of every turn of `steps` steps, by number of workers. `predicted`:
    samples per second, by number of workers.
    """
    base = next(iter(turns))
    base_rate = median(_rates(turns[base]))
    found = []
    for workers, taken in turns.items():
        rates = _rates(taken)
        low, rate, high = quantiles(rates, n=4, method="inclusive") if len(rates) > 1 else rates * 3
        speedup = rate / base_rate
        found.append(
            ScalingRow(
                mode=mode,
                workers=workers,
                samples_per_s=rate,
                low=low,
                high=high,
                speedup=speedup,
                efficiency=efficiency(speedup, workers, base),
                predicted_efficiency=efficiency(
                    predicted[workers] / predicted[base], workers, base
                ),
                threads=threads[workers],
                step_ms=1e3 * median(seconds for _, seconds in taken) / steps,
            )
        )
    return found


def _rates(turns: Sequence[tuple[int, float]]) -> list[float]:
    return [samples / seconds for samples, seconds in turns]


def _quartiles(row: ScalingRow, what: str) -> list[float]:
    """Return the quartiles of the speedup or the efficiency."""
    middle: float = getattr(row, what)
    return [middle * rate / row.samples_per_s for rate in (row.low, row.high)]


def _draw(plot: Plot, rows: Sequence[ScalingRow], what: str) -> None:
    """Draw the curves of one mode: measured with quartiles, and predicted."""
    colour = _COLOURS[rows[0].mode]
    for row in rows:
        ends = [(plot.x(row.workers), plot.y(end)) for end in _quartiles(row, what)]
        plot.line(ends, colour, 1)
    plot.curve([(row.workers, getattr(row, what)) for row in rows], colour, dots=True)
    ideal = [row.speedup / row.efficiency if what == "speedup" else 1.0 for row in rows]
    predicted = [
        (row.workers, row.predicted_efficiency * most)
        for row, most in zip(rows, ideal, strict=True)
    ]
    plot.curve(predicted, colour, width=1.2, dashes="1.5 3")


def remarks(
    rows: Sequence[ScalingRow], *, cores: int, device: str, busy: str | None = None
) -> list[str]:
    """Return the remarks, the most important first. `cores`: number of cores of this host, or of
    its GPUs if `device` is cuda. `busy`: its load before the measurement, if it was high.
    """
    return [
        *_busy(rows, busy),
        *_alone(rows),
        *(_crowded(rows, cores) if device == "cpu" else ()),
        *_threads(rows, device),
        *_above_one(rows),
    ]


def _busy(rows: Sequence[ScalingRow], busy: str | None) -> Iterator[str]:
    """Warn of other programs. If one of them takes a core from a thread, the rank's other threads
    wait for it: this slows ranks with many threads most.
    """
    if busy is not None:
        threads = (
            " and threads of one rank wait for each other; --threads 1 suffers least,"
            if max(row.threads for row in rows) > 1
            else ""
        )
        yield (
            f"this host was busy before the measurement ({busy}): other programs take time from"
            f" it{threads or ','} so measure again on a quiet host"
        )


def _alone(rows: Sequence[ScalingRow]) -> Iterator[str]:
    counts = {row.workers for row in rows}
    if len(counts) == 1:
        yield (
            f"{counted(counts.pop(), 'worker')} only: there is nothing to compare with, so the"
            " speedup is 1"
        )


def _crowded(rows: Sequence[ScalingRow], cores: int) -> Iterator[str]:
    """Warn of more ranks, or more threads, than cores: they take turns."""
    crowded = sorted({row.workers for row in rows if row.workers > cores})
    if crowded:
        yield (
            f"{_listed(crowded)} workers on {counted(cores, 'core')}: ranks wait for a core that"
            " another one has, so the figure says little about the task, and nothing about"
            f" {_listed(crowded)} cores"
        )
    threads = sorted(
        {row.workers for row in rows if row.workers <= cores < row.workers * row.threads}
    )
    if threads:
        yield (
            f"{_listed(threads)} workers with {rows[0].threads} threads each are more than the"
            f" {counted(cores, 'core')} that there are: they wait for each other; --threads"
            f" {max(1, cores // max(threads))} fits"
        )


def _threads(rows: Sequence[ScalingRow], device: str) -> Iterator[str]:
    """Warn if the threads of a rank differ between rows: ranks are then not comparable."""
    first = rows[0]
    others = sorted({row.workers for row in rows if row.threads != first.threads})
    if others and device == "cpu":
        yield (
            f"ranks had {counted(first.threads, 'thread')} with {counted(first.workers, 'worker')},"
            f" and other numbers with {_listed(others)}: the same cores are compared, used in two"
            " ways; --threads 1 compares equal ranks, on as many cores as workers"
        )


def _above_one(rows: Sequence[ScalingRow]) -> Iterator[str]:
    for row in rows:
        base = next(each for each in rows if each.mode == row.mode)
        if row.efficiency > 1 and row.workers > base.workers:
            # fewer workers than the base can have an efficiency above 1
            within = (
                row.low / row.samples_per_s * row.efficiency <= 1
                or base.high / base.samples_per_s >= row.efficiency
            )
            why = (
                "the quartiles reach below it: noise would explain it"
                if within
                else _WHY_FAR
                if row.efficiency > _FAR
                else _WHY_ABOVE
            )
            yield (
                f"{row.mode}, {counted(row.workers, 'worker')}: efficiency"
                f" {100 * row.efficiency:.0f} % is above the ideal, shown as measured; {why}"
            )


_FAR = 1.5  # efficiency above which caches are no explanation
_WHY_FAR = (
    "so the base was slowed down: by other programs on this host, or by threads of one rank that"
    " wait for each other (--threads 1)"
)
_WHY_ABOVE = (
    "smaller shares may fit a cache that the whole does not, or one process uses several threads"
    " worse than several processes one"
)


def _listed(counts: Sequence[int]) -> str:
    """Return a text such as "2", "2 and 4" or "2, 4 and 8"."""
    *most, last = map(str, counts)
    return f"{', '.join(most)} and {last}" if most else last
