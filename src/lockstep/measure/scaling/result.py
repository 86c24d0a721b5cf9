"""Speedup and efficiency at each number of workers, from the rates of all rounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from lockstep.measure.scaling.counts import Mode


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One number of workers in one mode."""

    mode: Mode
    workers: int
    samples_per_s: float
    """Of all ranks together, the median over the rounds."""
    low: float
    high: float
    """Quartiles of `samples_per_s` over the rounds."""
    speedup: float
    """`samples_per_s` over that of the first number of workers of the same mode, the base."""
    efficiency: float
    """`speedup` over how many times the base's workers these are."""
    predicted_efficiency: float
    """From one rank's work measured alone and the link (prediction.py)."""
    threads: int
    """Intra-op threads of each rank."""
    step_ms: float
    """The median over the rounds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scaling:
    """What `lockstep.benchmark_scaling` found: `rows`, and what they were measured on."""

    task: str
    rows: Sequence[Row]
    modes: Mapping[Mode, str]
    """What stays the same in each, in words."""
    where: str
    """The machine, in words."""
    how: str
    """Steps, rounds and what is timed, in words."""
    remarks: Sequence[str]
    """What a reader of the figures should know."""
    cores: int
    device: str

    def describe(self) -> str:
        """A table a mode and the remarks, as the command prints them."""
        from lockstep.measure.scaling import report

        return report.table(self)

    def plot(self, file: Path | str) -> None:
        """Draw speedup and efficiency against workers: ideal, measured with its quartiles, predicted. Raises UsageError without matplotlib."""
        from lockstep.measure.scaling import report

        report.plot(self, Path(file))

    def as_json(self) -> dict[str, Any]:
        """Plain data: numbers, text, lists and dicts."""
        return asdict(self) | {"rows": [asdict(row) for row in self.rows], "modes": dict(self.modes), "remarks": list(self.remarks)}


def efficiency(speedup: float, workers: int, base: int) -> float:
    """The share of the ideal: `workers / base` times the base's rate would be 1."""
    return speedup / (workers / base)


def rows(
    mode: Mode, turns: Mapping[int, Sequence[tuple[int, float]]], predicted: Mapping[int, float], threads: Mapping[int, int], steps: int
) -> list[Row]:
    """A row for each number of workers, in the order of `turns`, of which the first is the base.

    `turns`: samples and seconds of every turn of so many steps, by number of workers; `predicted`: samples a second, too.
    """
    base = next(iter(turns))
    base_rate = median(_rates(turns[base]))
    found = []
    for workers, taken in turns.items():
        rates = _rates(taken)
        low, rate, high = quantiles(rates, n=4, method="inclusive") if len(rates) > 1 else rates * 3
        speedup = rate / base_rate
        found.append(
            Row(
                mode=mode,
                workers=workers,
                samples_per_s=rate,
                low=low,
                high=high,
                speedup=speedup,
                efficiency=efficiency(speedup, workers, base),
                predicted_efficiency=efficiency(predicted[workers] / predicted[base], workers, base),
                threads=threads[workers],
                step_ms=1e3 * median(seconds for _, seconds in taken) / steps,
            )
        )
    return found


def _rates(turns: Sequence[tuple[int, float]]) -> list[float]:
    return [samples / seconds for samples, seconds in turns]
