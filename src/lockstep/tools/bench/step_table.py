"""What was measured of training steps: a table to read, and a picture."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from lockstep.data.windows import counted
from lockstep.tools.bench.training_step import StepComparison, StepRow
from lockstep.tools.timing.output_files import picture
from lockstep.tools.timing.tables import milliseconds, table

_COLOURS = {"local": "0.75", "ddp": "tab:orange", "accelerate": "tab:pink", "fabric": "tab:purple"}
_OURS = "tab:blue"


def text(found: StepComparison) -> str:
    """A line a way. "DDP / it" is the best DDP's median over this one's: above 1 is quicker than
    DDP.
    """
    best = f"; best DDP: {found.best.variant}" if found.best else ""
    has_memory = any(row.peak_mib is not None for row in found.rows)
    head = ["variant", "median", "p25", "DDP / it", "apart", *(["peak MiB"] if has_memory else [])]
    compared = [
        row.variant
        for row in sorted(found.rows, key=lambda row: not row.variant.startswith("ddp"))
        if row.apart is None
    ]
    wrong = [
        f"{row.variant} trained something else: its weights lie {row.apart:.2g} of the way that"
        f" they moved from those of {compared[0]}, and more than {found.tolerance:g} is no rounding"
        for row in found.wrong
    ]
    return "\n".join(
        [
            (
                f"{found.task}: {found.recipe}; {found.gradient_mib:.1f} MiB of gradients,"
                f" {found.precision}"
            ),
            (
                f"{counted(found.workers, 'rank')} on {found.device}, torch {torch.__version__},"
                f" {found.steps} steps each in turns{best}"
            ),
            table(head, [_row(found, row)[: len(head)] for row in found.rows]),
            *(f"{name} is left out: {reason}" for name, reason in found.left_out.items()),
            *("\n".join(textwrap.wrap(note, 120)) for note in found.notes),
            *wrong,
        ]
    )


def _row(found: StepComparison, row: StepRow) -> list[str]:
    figures = [(found.ratio(row), ".2f"), (row.apart, ".0e"), (row.peak_mib, ".1f")]
    told = ["" if each is None else f"{each:{how}}" for each, how in figures]
    return [row.variant, milliseconds(row.median), milliseconds(row.p25), *told]


def plot(every: Sequence[StepComparison], file: Path) -> None:
    """A panel a task, a bar a way: the median, and a mark at the 25th percentile. Raises
    UsageError without matplotlib.
    """
    most = max(len(found.rows) for found in every)
    with picture(file, len(every), 1 + 4.5 * len(every), 1.6 + 0.34 * most) as (figure, axes):
        for axis, found in zip(axes, every, strict=True):
            _panel(axis, found)
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="lower center", ncol=2, frameon=False, fontsize=8)
        figure.tight_layout(rect=(0, 0.05, 1, 1))


def _panel(axis: Any, found: StepComparison) -> None:
    names = [row.variant for row in found.rows]
    medians = [1e3 * row.median for row in found.rows]
    bars = axis.barh(
        names, medians, color=[_COLOURS.get(name.partition(":")[0], _OURS) for name in names]
    )
    axis.plot(
        [1e3 * row.p25 for row in found.rows],
        names,
        "|",
        color="black",
        markersize=10,
        label="25th percentile",
    )
    axis.bar_label(
        bars,
        fmt="%.1f",
        padding=4,
        fontsize=8,
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5},
    )
    if found.best is not None:
        axis.axvline(
            1e3 * found.best.median,
            color=_COLOURS["ddp"],
            linewidth=1,
            linestyle="--",
            label="best DDP",
        )
    axis.set(xlim=(0, 1.18 * max(medians)), xlabel="ms a step, median of the slowest rank")
    axis.set_title(f"{found.task}, {counted(found.workers, 'rank')} on {found.device}", fontsize=10)
    axis.invert_yaxis()
    axis.grid(axis="x", alpha=0.3)
    axis.set_axisbelow(True)
