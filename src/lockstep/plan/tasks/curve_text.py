"""A curve as a table to read, and as a picture."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from lockstep.measure.files import pyplot, save
from lockstep.plan.tasks.curve import Curve, Row


def table(found: Curve) -> str:
    """A line a number of ranks. Of the steps, eight of ten are foretold to lie in the interval."""
    return "\n".join((_head(found), *(_line(row) for row in found.rows), *_notes(found)))


def _head(found: Curve) -> str:
    fails = f"{'goodput':>9}{'save every':>12}" if any(row.goodput for row in found.rows) else ""
    return f"{'workers':>7}{'step':>11}{'8 of 10 lie in':>23}{'efficiency':>12}{'samples/s':>11}{'sent a step':>13}{fails}  limiting"


def _line(row: Row) -> str:
    step = row.predicted
    between = f"{_time(step.low)} .. {_time(step.high)}"
    fails = ""
    if row.goodput is not None:
        fails = f"{100 * row.goodput.share:>7.1f} %{_time(row.goodput.interval):>12}"
    share = step.parts[step.limiting] / step.step
    return (
        f"{row.workers:>7}{_time(step.step):>11}{between:>23}{100 * row.efficiency:>10.1f} %{row.samples_per_s:>11.4g}"
        f"{step.sent / 1e6:>10.3f} MB{fails}  {step.limiting} {100 * share:.0f} %"
    )


def _notes(found: Curve) -> Iterator[str]:
    base = found.scaling.base
    kind = f"every rank keeps its share of {base} (weak scaling)" if found.scaling.weak else "the global batch stays (strong scaling)"
    yield f"{kind}; efficiency is against {base} rank{'s' * (base > 1)}"
    if found.idle_from is not None:
        yield (
            f"a step has {found.slots} micro-batch{'es' * (found.slots > 1)}: among {found.idle_from} ranks some have none, and wait; a smaller "
            "micro_batch, a larger global_batch or --weak gives them something to do"
        )


def plot(found: Curve, file: Path) -> None:
    """Samples a second over the number of ranks, with the interval and the ideal line. Raises UsageError without matplotlib."""
    plt = pyplot()
    figure, axis = plt.subplots(figsize=(6.4, 4.2))
    counts = [row.workers for row in found.rows]
    first = found.rows[0]
    ideal = [first.samples_per_s / first.efficiency * count / first.workers for count in counts]
    axis.plot(counts, ideal, "--", color="0.6", label="ideal")
    axis.plot(counts, [row.samples_per_s for row in found.rows], "o-", color="tab:blue", markersize=4, label="predicted")
    low = [row.samples / row.predicted.high for row in found.rows]
    high = [row.samples / row.predicted.low for row in found.rows]
    axis.fill_between(counts, low, high, color="tab:blue", alpha=0.2, label="8 steps of 10")
    axis.set(xlabel="workers", ylabel="samples/s")
    if len(counts) > 1:
        axis.set(xscale="log", yscale="log")
        axis.set_xticks(counts, [str(count) for count in counts])
        axis.minorticks_off()
    axis.set_title(f"{found.task}, {'weak' if found.scaling.weak else 'strong'} scaling")
    axis.grid(alpha=0.3)
    axis.legend()
    figure.tight_layout()
    save(figure, file)


def _time(seconds: float) -> str:
    if seconds < 10:
        return f"{1e3 * seconds:.1f} ms"
    return f"{seconds:.4g} s" if seconds < 600 else f"{seconds / 60:.4g} min"
