"""What a reader of scaling figures should know before believing them. Pure: rows and the machine
go in, sentences come out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lockstep.data.windows import counted
from lockstep.tools.bench.scaling.speedup import ScalingRow


def remarks(
    rows: Sequence[ScalingRow], *, cores: int, device: str, busy: str | None = None
) -> list[str]:
    """In the order of importance. `cores`: of this host, or its GPUs where `device` is cuda.
    `busy`: its load before, where that was high.
    """
    return [
        *_busy(rows, busy),
        *_alone(rows),
        *(_crowded(rows, cores) if device == "cpu" else ()),
        *_threads(rows, device),
        *_above_one(rows),
    ]


def _busy(rows: Sequence[ScalingRow], busy: str | None) -> Iterator[str]:
    """Threads of one rank wait for the one that another program has taken the core from: that
    slows few ranks of many threads most.
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
            f"{counted(counts.pop(), 'worker')} only: there is nothing to compare with, and the"
            " speedup is 1 by definition"
        )


def _crowded(rows: Sequence[ScalingRow], cores: int) -> Iterator[str]:
    """More ranks than cores take turns on them."""
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
            f"{_listed(threads)} workers with {rows[0].threads} threads each are more threads than"
            f" the {counted(cores, 'core')} that there are: they wait for each other; --threads"
            f" {max(1, cores // max(threads))} fits"
        )


def _threads(rows: Sequence[ScalingRow], device: str) -> Iterator[str]:
    """A rank that has more threads at the base than later is not the same rank."""
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
            # fewer than the base are expected above it
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


_FAR = 1.5  # what caches do not explain
_WHY_FAR = (
    "so far above it, the base was held up: by other programs on this host, or by threads of one"
    " rank that wait for each other (--threads 1)"
)
_WHY_ABOVE = (
    "smaller shares may fit a cache that the whole does not, or one process uses several threads"
    " worse than several processes one"
)


def _listed(counts: Sequence[int]) -> str:
    """ "2", "2 and 4", "2, 4 and 8"."""
    *most, last = map(str, counts)
    return f"{', '.join(most)} and {last}" if most else last
