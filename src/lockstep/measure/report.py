"""What was measured of training steps: a table to read, and a picture."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

import torch

from lockstep.measure.files import pyplot, save
from lockstep.measure.training_step import Comparison, Row

_COLOURS = {"local": "0.75", "ddp": "tab:orange", "accelerate": "tab:pink", "fabric": "tab:purple"}
_OURS = "tab:blue"


def table(found: Comparison) -> str:
    """A line a way. "DDP / it" is the best DDP's median over this one's: above 1 is quicker than DDP."""
    has_memory = any(row.peak_mib is not None for row in found.rows)
    best = f"; best DDP: {found.best.variant}" if found.best else ""
    lines = [
        f"{found.task}: {found.recipe}; {found.gradient_mib:.1f} MiB of gradients, {found.precision}",
        f"{found.workers} rank{'s' * (found.workers != 1)} on {found.device}, torch {torch.__version__}, {found.steps} steps each in turns{best}",
        f"{'variant':<17}{'median':>11}{'p25':>11}{'DDP / it':>10}{'apart':>9}{'peak MiB':>10}"[: None if has_memory else 58],
    ]
    lines += [_line(found, row, has_memory) for row in found.rows]
    lines += [f"{name} is left out: {reason}" for name, reason in found.left_out.items()]
    lines += [_folded(note) for note in found.notes]
    for row in found.wrong:
        lines.append(
            f"{row.variant} trained something else: its weights lie {row.apart:.2g} of the way that they moved from those of "
            f"{_reference(found)}, and more than {found.tolerance:g} is no rounding"
        )
    return "\n".join(lines)


def _reference(found: Comparison) -> str:
    return next(row.variant for row in [*(row for row in found.rows if row.variant.startswith("ddp")), *found.rows] if row.apart is None)


def _line(found: Comparison, row: Row, has_memory: bool) -> str:
    ratio, apart = found.ratio(row), row.apart
    line = f"{row.variant:<17}{1e3 * row.median:>8.1f} ms{1e3 * row.p25:>8.1f} ms"
    line += f"{'' if ratio is None else f'{ratio:.2f}':>10}{'' if apart is None else f'{apart:.0e}':>9}"
    return (line + (f"{row.peak_mib:>10.1f}" if has_memory and row.peak_mib is not None else "")).rstrip()


def _folded(text: str) -> str:
    return "\n".join(textwrap.wrap(text, 120))


def plot(every: Sequence[Comparison], file: Path) -> None:
    """A panel a task, a bar a way: the median, and a mark at the 25th percentile. Raises UsageError without matplotlib."""
    plt = pyplot()
    most = max(len(found.rows) for found in every)
    figure, axes = plt.subplots(1, len(every), figsize=(1 + 4.5 * len(every), 1.6 + 0.34 * most), squeeze=False)
    for axis, found in zip(axes[0], every, strict=True):
        names = [row.variant for row in found.rows]
        medians = [1e3 * row.median for row in found.rows]
        bars = axis.barh(names, medians, color=[_COLOURS.get(name.partition(":")[0], _OURS) for name in names])
        axis.plot([1e3 * row.p25 for row in found.rows], names, "|", color="black", markersize=10, label="25th percentile")
        axis.bar_label(bars, fmt="%.1f", padding=4, fontsize=8, bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5})
        if found.best is not None:
            axis.axvline(1e3 * found.best.median, color=_COLOURS["ddp"], linewidth=1, linestyle="--", label="best DDP")
        axis.set(xlim=(0, 1.18 * max(medians)), xlabel="ms a step, median of the slowest rank")
        axis.set_title(f"{found.task}, {found.workers} rank{'s' * (found.workers != 1)} on {found.device}", fontsize=10)
        axis.invert_yaxis()
        axis.grid(axis="x", alpha=0.3)
        axis.set_axisbelow(True)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncol=2, frameon=False, fontsize=8)
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    save(figure, file)
