"""What `lockstep tune` prints. It needs no torch: the launcher prints it after the ranks exit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lockstep.tools.timing.output_files import table as text_table
from lockstep.tools.tune.micro_batch import Size, fastest
from lockstep.tools.tune.search import Found, KnobRow, PairedTimes, Value

_HEAD = "knob | value | ms a step | p25 | before | p25 | ratio | noise | turns | "


def progress(row: KnobRow) -> str:
    """Describe one row in a line, as soon as it is known."""
    what = row.knob if row.value is None else f"{row.knob}={spelled(row.value)}"
    if row.comparison is None:
        return f"{what}: not tried, {row.note}"
    return f"{what}: {row.comparison.ratio:.2f} of the time before{', taken' if row.won else ''}"


def table(found: Found) -> str:
    """Return a line for every value that was tried or not, then the winner against the default."""
    rows = [_cells(row) for row in found.rows]
    winner = "the default; no setting was faster by more than noise"
    if found.final is not None:
        rows.append(["in the end", "all that won", *_figures(found.final)])
        winner = "the default; the combined settings were not faster at the end"
        if found.changes:
            winner = (
                f"{said(found.changes)}; its step takes {found.final.ratio:.2f} of the default's"
                " time"
            )
    return f"{text_table(_HEAD, rows, left=(0, 1, 9))}\n\nwinner: {winner}"


def _cells(row: KnobRow) -> list[str]:
    if row.comparison is None:
        return [
            row.knob,
            "" if row.value is None else spelled(row.value),
            *[""] * 7,
            f"not tried: {row.note}",
        ]
    return [row.knob, spelled(row.value), *_figures(row.comparison), "faster" if row.won else ""]


def _figures(found: PairedTimes) -> list[str]:
    times = (found.candidate, found.candidate_p25, found.base, found.base_p25)
    return [
        *(f"{1e3 * seconds:.2f}" for seconds in times),
        f"{found.ratio:.3f}",
        f"{found.noise:.3f}",
        str(found.turns),
    ]


def said(changes: Mapping[str, Value]) -> str:
    """Format changes: `update=sharded, threads=2`."""
    return ", ".join(f"{name}={spelled(value)}" for name, value in changes.items())


def spelled(value: Value) -> str:
    """Format a value as the command line accepts it."""
    return f"{value:g}" if isinstance(value, float) else str(value)


def _size_cells(size: Size, own: int) -> list[str]:
    if not size.ran:
        return [str(size.micro_batch), "", "", "", "", size.note]
    against = (
        [f"{size.comparison.ratio:.3f}", f"{size.comparison.noise:.3f}"]
        if size.comparison
        else ["", ""]
    )
    note = (
        "the task's own"
        if size.micro_batch == own
        else "faster"
        if size.comparison and size.comparison.faster
        else ""
    )
    return [
        str(size.micro_batch),
        f"{size.samples_per_s:,.0f}",
        *against,
        f"{size.memory / 2**20:,.0f}",
        note,
    ]


def advice(sizes: Sequence[Size], own: int, global_batch: int) -> str:
    """Return the table of sizes and the advice."""
    head = "micro_batch | samples/s | ratio | noise | MiB a rank | "
    rows = [_size_cells(size, own) for size in sorted(sizes, key=lambda size: size.micro_batch)]
    lines = [text_table(head, rows, left=(0, 5))]
    ran = [size.micro_batch for size in sizes if size.ran]
    if not ran:
        return lines[0]
    better = fastest(sizes)
    which = (
        f"micro_batch={better.micro_batch} is fastest"
        if better
        else f"no size is faster than the task's own {own} by more than noise"
    )
    lines += [
        "",
        (
            f"advice: {which}; the largest that ran is {max(ran)}, of a global batch of"
            f" {global_batch}."
        ),
    ]
    if better:
        lines.append(
            "It is not among the settings: another micro_batch changes the training (BatchNorm"
            " sees other batches; dropout and the order of sums change). To use it, return"
            f" micro_batch={better.micro_batch}, or --set it where task() takes it."
        )
    return "\n".join(lines)
