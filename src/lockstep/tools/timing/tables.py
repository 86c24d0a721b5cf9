"""Tables as plain text: columns as wide as what stands in them, never wrapped, whatever they are
printed on.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence

_WIDE = 10_000  # characters: more than any line has


def table(
    head: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    left: Iterable[int] = (0,),
    gap: int = 2,
) -> str:
    """A line for the head and one for each row. Columns whose numbers are in `left` begin at the
    left, the others end at the right.

    A row may have fewer cells than the head. None is an empty cell. A head of empty names is left
    out. `gap`: blanks between two columns.
    """
    from rich.console import Console  # takes a while
    from rich.table import Table

    made = Table(box=None, padding=(0, gap, 0, 0), pad_edge=False, show_header=any(head))
    at_the_left = set(left)
    for place, name in enumerate(head):
        made.add_column(name, justify="left" if place in at_the_left else "right", no_wrap=True)
    for row in rows:
        made.add_row(*("" if cell is None else str(cell) for cell in row))
    console = Console(
        file=io.StringIO(),
        width=_WIDE,
        color_system=None,
        markup=False,
        highlight=False,
        emoji=False,
    )
    with console.capture() as captured:
        console.print(made)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


def milliseconds(seconds: float) -> str:
    """`12.3 ms`."""
    return f"{1e3 * seconds:.1f} ms"


def percent(share: float) -> str:
    """`98.7 %`."""
    return f"{100 * share:.1f} %"


def megabytes(count: float) -> str:
    """`1.250 MB`."""
    return f"{count / 1e6:.3f} MB"
