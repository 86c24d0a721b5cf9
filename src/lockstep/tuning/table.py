"""What `lockstep tune` prints. No torch: the launcher prints it when the ranks have gone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lockstep.tuning.comparison import Comparison
from lockstep.tuning.micro_batch import Size, fastest
from lockstep.tuning.search import Found, Row, Value

HEAD = f"{'knob':<16}{'value':<16}{'ms a step':>10}{'p25':>9}{'before':>9}{'p25':>9}{'ratio':>8}{'noise':>8}{'turns':>7}"


def row_line(row: Row) -> str:
    """One line of the table."""
    begin = f"{row.knob:<16}{spelled(row.value) if row.comparison or row.value is not None else '':<16}"
    if row.comparison is None:
        return f"{begin}not tried: {row.note}"
    return f"{begin}{_figures(row.comparison)}{'  faster' if row.won else ''}"


def progress(row: Row) -> str:
    """A row as it is known, while the rest is still to be tried."""
    what = row.knob if row.value is None else f"{row.knob}={spelled(row.value)}"
    if row.comparison is None:
        return f"{what}: not tried, {row.note}"
    return f"{what}: {row.comparison.ratio:.2f} of the time before{', taken' if row.won else ''}"


def table(found: Found) -> str:
    """A line for everything that was tried, or was not, then the winner beside the default."""
    lines = [HEAD, *map(row_line, found.rows)]
    if found.final is None:
        return "\n".join([*lines, "", "winner: the default; nothing was faster than it by more than noise"])
    lines.append(f"{'in the end':<16}{'all that won':<16}{_figures(found.final)}")
    if found.changes:
        lines += ["", f"winner: {said(found.changes)}; its step takes {found.final.ratio:.2f} of the default's time"]
    else:
        lines += ["", "winner: the default; what had won one by one was not faster than it in the end"]
    return "\n".join(lines)


def _figures(found: Comparison) -> str:
    times = (found.candidate, found.candidate_p25, found.base, found.base_p25)
    first, *others = (1e3 * seconds for seconds in times)
    return f"{first:>10.2f}{''.join(f'{each:>9.2f}' for each in others)}{found.ratio:>8.3f}{found.noise:>8.3f}{found.turns:>7}"


def said(changes: Mapping[str, Value]) -> str:
    """update=sharded, threads=2"""
    return ", ".join(f"{name}={spelled(value)}" for name, value in changes.items())


def spelled(value: Value) -> str:
    """As the command line takes it."""
    return f"{value:g}" if isinstance(value, float) else str(value)


def size_line(size: Size, own: int) -> str:
    """One line of the advice's table."""
    begin = f"{size.micro_batch:<16}"
    if not size.ran:
        return f"{begin}{size.note}"
    against = f"{size.comparison.ratio:>8.3f}{size.comparison.noise:>8.3f}" if size.comparison else " " * 16
    end = "  the task's own" if size.micro_batch == own else "  faster" if size.comparison and size.comparison.faster else ""
    return f"{begin}{size.samples_per_s:>12,.0f}{against}{size.memory / 2**20:>14,.0f}{end}"


def advice(sizes: Sequence[Size], own: int, global_batch: int) -> str:
    """The sizes' table and what to make of it."""
    lines = [f"{'micro_batch':<16}{'samples/s':>12}{'ratio':>8}{'noise':>8}{'MiB a rank':>14}"]
    lines += [size_line(size, own) for size in sorted(sizes, key=lambda size: size.micro_batch)]
    ran = [size for size in sizes if size.ran]
    if not ran:
        return "\n".join(lines)
    better, widest = fastest(sizes), max(size.micro_batch for size in ran)
    which = f"micro_batch={better.micro_batch} is fastest" if better else f"no size is faster than the task's own {own} by more than noise"
    lines += ["", f"advice: {which}; the largest that ran is {widest}, of a global batch of {global_batch}."]
    if better:
        lines.append(
            "It is not among the settings: another micro_batch is another training (BatchNorm sees other batches, dropout and the order of sums "
            f"change). To have it, let task() give micro_batch={better.micro_batch}, or --set it where task() takes it."
        )
    return "\n".join(lines)
