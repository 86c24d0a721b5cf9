"""What was measured of scaling: a table to read, and a picture."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

from lockstep.data.windows import counted
from lockstep.measure.files import pyplot, save
from lockstep.measure.scaling.counts import Mode
from lockstep.measure.scaling.result import Row, Scaling

_WIDTH = 120
_MODE_COLOURS: dict[Mode, str] = {"strong": "tab:blue", "weak": "tab:orange"}
_HEAD = f"{'workers':>7}{'threads':>9}{'ms a step':>11}{'samples/s':>11}{'lower quarter':>15}{'upper':>9}{'speedup':>9}{'efficiency':>12}{'predicted':>11}"


def table(found: Scaling) -> str:
    """A table a mode. Efficiencies are in per cent, of the base's rate times the workers' ratio."""
    lines = [f"{found.task} on {found.where}", found.how]
    for mode, words in found.modes.items():
        lines += ["", words, _HEAD, *(_line(row) for row in found.rows if row.mode == mode)]
    if found.remarks:
        lines += ["", *("\n".join(textwrap.wrap(remark, _WIDTH, subsequent_indent="  ")) for remark in found.remarks)]
    return "\n".join(lines)


def _line(row: Row) -> str:
    return (
        f"{row.workers:>7}{row.threads:>9}{row.step_ms:>11.2f}{row.samples_per_s:>11,.0f}{row.low:>15,.0f}{row.high:>9,.0f}"
        f"{row.speedup:>9.2f}{100 * row.efficiency:>10.1f} %{100 * row.predicted_efficiency:>9.1f} %"
    )


def plot(found: Scaling, file: Path) -> None:
    """Speedup on the left, efficiency on the right, against workers: ideal, measured with quartiles, predicted."""
    plt = pyplot()
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.8))
    counts = sorted({row.workers for row in found.rows})
    base = found.rows[0].workers
    for axis, what in zip(axes, ("speedup", "efficiency"), strict=True):
        ideal = [count / base if what == "speedup" else 1.0 for count in counts]
        axis.plot(counts, ideal, color="0.6", linestyle="--", label="ideal")
        for mode in found.modes:
            _draw(axis, [row for row in found.rows if row.mode == mode], what)
        axis.set(xlabel="workers", ylabel=f"{what}, base: {counted(base, 'worker')}", xticks=counts, ylim=(0, None))
        axis.grid(alpha=0.3)
        if found.device == "cpu" and max(counts) > found.cores:
            axis.axvspan(
                found.cores + 0.05, max(counts) + 0.1, color="0.93", zorder=0, label=f"more ranks than the {counted(found.cores, 'core')}"
            )
    handles, labels = axes[0].get_legend_handles_labels()
    figure.suptitle(f"{found.task} on {found.where}", fontsize=9)
    figure.legend(handles, labels, loc="lower center", ncol=3, frameon=False, fontsize=8)
    figure.tight_layout(rect=(0, 0.06 + 0.06 * (len(labels) > 3), 1, 1))
    save(figure, file)


def _draw(axis: Any, rows: list[Row], what: str) -> None:
    """One mode: what was measured, with its quartiles, and what was predicted."""
    rows = sorted(rows, key=lambda row: row.workers)
    counts = [row.workers for row in rows]
    values = [getattr(row, what) for row in rows]
    below = [value * (1 - row.low / row.samples_per_s) for row, value in zip(rows, values, strict=True)]
    above = [value * (row.high / row.samples_per_s - 1) for row, value in zip(rows, values, strict=True)]
    colour, mode = _MODE_COLOURS[rows[0].mode], rows[0].mode
    axis.errorbar(counts, values, yerr=[below, above], fmt="o-", markersize=4, capsize=3, color=colour, label=f"{mode}, measured")
    ideal = [row.speedup / row.efficiency if what == "speedup" else 1.0 for row in rows]
    predicted = [row.predicted_efficiency * most for row, most in zip(rows, ideal, strict=True)]
    axis.plot(counts, predicted, "x:", color=colour, label=f"{mode}, predicted")
