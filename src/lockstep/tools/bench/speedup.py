"""Computes speedup and efficiency at each number of workers from the rates of all rounds. Makes a
table, a picture, and remarks that warn of misleading figures.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from lockstep.tools.drawing import FAINT, Plot, figure
from lockstep.tools.timing.output_files import counted, percent, table

_WIDTH = 120
_COLOUR, _BEYOND = "var(--blue)", "var(--grey)"
_HEAD = "workers | threads | ms a step | samples/s | lower quarter | upper | speedup | efficiency"


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """One measurement at one number of workers."""

    samples: int
    """Samples of all ranks."""
    seconds: float
    threads: int
    """Intra-op threads of a rank."""
    reduction: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ScalingRow:
    """The row of one number of workers."""

    workers: int
    samples_per_s: float
    """Samples per second of all ranks together, median over the rounds."""
    low: float
    high: float
    """Quartiles of `samples_per_s` over the rounds."""
    speedup: float
    """`samples_per_s` divided by that of the base: the first number of workers."""
    efficiency: float
    """`speedup` divided by the ratio of `workers` to the base's workers."""
    threads: int
    """Intra-op threads of each rank."""
    step_ms: float
    """Milliseconds of a step, median over the rounds."""

    def cells(self) -> list[str]:
        return [
            str(self.workers),
            str(self.threads),
            f"{self.step_ms:.2f}",
            f"{self.samples_per_s:,.0f}",
            f"{self.low:,.0f}",
            f"{self.high:,.0f}",
            f"{self.speedup:.2f}",
            percent(self.efficiency),
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Scaling:
    """The result of `lockstep.benchmark_scaling`: `rows`, and what they were measured on.
    `describe()` gives the table.
    """

    task: str
    rows: Sequence[ScalingRow]
    mode: str
    """`strong` or `weak`."""
    constant: str
    """What stays the same at every number of workers, in words."""
    where: str
    """The machine, in words."""
    how: str
    """Steps, rounds and what is timed, in words."""
    remarks: Sequence[str]
    """Sentences that warn of misleading figures."""
    cores: int
    device: str

    def describe(self) -> str:
        """Return a table and the remarks, as the command prints them."""
        lines = [f"{self.task} on {self.where}", self.how, "", self.constant]
        lines.append(table(_HEAD, [row.cells() for row in self.rows], left=()))
        for remark in self.remarks:
            lines += ["", textwrap.fill(remark, _WIDTH, subsequent_indent="  ")]
        return "\n".join(lines)

    def plot(self, file: Path | str) -> None:
        """Draw speedup and efficiency over workers into an SVG file: ideal, and measured with
        quartiles. Raises UsageError if it cannot be written.
        """
        panels = [self._panel("speedup"), self._panel("efficiency")]
        figure(f"{self.task} on {self.where}", panels, self.describe()).save(file)

    def _panel(self, value: str) -> Plot:
        rows = sorted(self.rows, key=lambda row: row.workers)
        base = self.rows[0].workers
        counts = [row.workers for row in rows]
        ideal = [1.0] * len(rows)
        if value == "speedup":
            ideal = [count / base for count in counts]
        names = {"ideal": FAINT, f"{self.mode} scaling, measured": _COLOUR}
        crowded = self.device == "cpu" and counts[-1] > self.cores
        if crowded:
            names[f"more ranks than the {counted(self.cores, 'core')}"] = _BEYOND
        highest = max(getattr(row, value) * row.high / row.samples_per_s for row in rows)
        plot = Plot(
            (counts[0], counts[-1]),
            "workers",
            up=(0.0, max(*ideal, highest)),
            legend=names if value == "speedup" else None,
            numbers={count: str(count) for count in counts},
            title=f"{value}, base: {counted(base, 'worker')}",
        )
        if crowded:
            plot.stripe(max(self.cores, counts[0]), counts[-1], _BEYOND)
        plot.curve(zip(counts, ideal, strict=True), FAINT, dashes="5 4")
        for row in rows:
            unit = getattr(row, value) / row.samples_per_s
            x = plot.x(row.workers)
            low = plot.y(unit * row.low)
            high = plot.y(unit * row.high)
            plot.line([(x, low), (x, high)], _COLOUR, 1)
        plot.curve([(row.workers, getattr(row, value)) for row in rows], _COLOUR, dots=True)
        return plot

    def as_json(self) -> dict[str, Any]:
        """Return plain data: numbers, strings, lists and dicts."""
        rows = [asdict(row) for row in self.rows]
        return asdict(self) | {"rows": rows, "remarks": list(self.remarks)}


def efficiency(speedup: float, workers: int, base: int) -> float:
    """Return the speedup divided by the ideal one, `workers / base`."""
    return speedup / (workers / base)


def rows(turns: Mapping[int, Sequence[Turn]], steps: int) -> list[ScalingRow]:
    """Return a row for each number of workers, in the order of `turns`; the first is the base.
    `steps`: the steps of every turn.
    """
    measured: list[ScalingRow] = []
    for workers, taken in turns.items():
        rates = [turn.samples / turn.seconds for turn in taken]
        low = rate = high = rates[0]
        if len(rates) > 1:
            low, rate, high = quantiles(rates, n=4, method="inclusive")
        base_workers = measured[0].workers if measured else workers
        base_rate = measured[0].samples_per_s if measured else rate
        speedup = rate / base_rate
        measured.append(
            ScalingRow(
                workers=workers,
                samples_per_s=rate,
                low=low,
                high=high,
                speedup=speedup,
                efficiency=efficiency(speedup, workers, base_workers),
                threads=taken[0].threads,
                step_ms=1e3 * median(turn.seconds for turn in taken) / steps,
            )
        )
    return measured


def remarks(rows: Sequence[ScalingRow], *, cores: int | None) -> list[str]:
    """Return the remarks, the most important first. `cores`: of this host; None on GPUs."""
    sentences = []
    if cores is not None:
        for row in rows:
            if row.workers * row.threads > cores:
                sentences.append(
                    f"{counted(row.workers, 'worker')} with {counted(row.threads, 'thread')} each on"
                    f" {counted(cores, 'core')}: they take turns, so this says little about the task"
                )
        if len({row.threads for row in rows}) > 1:
            sentences.append(
                "ranks had different numbers of threads: the same cores are compared, used in"
                " several ways; --threads 1 compares equal ranks"
            )
    for row in rows:
        if row.efficiency > 1 and row.workers > rows[0].workers:
            sentences.append(
                f"{counted(row.workers, 'worker')}: efficiency {100 * row.efficiency:.0f} % is above"
                " the ideal, shown as measured: noise, a share that fits into a cache, or a base"
                " whose threads wait for each other (--threads 1)"
            )
    return sentences
