"""Output of measured figures: JSON files, pictures, and plain-text tables that never wrap.

Files are checked before a measurement, so that its result is not lost to an unwritable file.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from lockstep.errors import UsageError
from lockstep.runs import finite


def check_writable(file: Path | None, option: str) -> None:
    """Check that the file can be written later. Keeps its content; creates no file. Raises
    UsageError with the name of the option.
    """
    if file is None:
        return
    new = not file.exists()
    with writing(file, option):
        file.open("ab").close()
        if new:
            file.unlink()


def check_picture(file: Path | None) -> None:
    """Check the file of --out as `check_writable` does. Raises UsageError also if its name does not
    end in .svg.
    """
    if file is None:
        return
    if file.suffix.lower() != ".svg":
        raise UsageError("wrong-ending", option="--out", file=str(file), endings=[".svg"])
    check_writable(file, "--out")


def write_json(file: Path | None, value: object) -> None:
    """Write `what` as JSON, with nan and infinities as strings. Raises UsageError if the file
    cannot be written.
    """
    if file is None:
        return
    with writing(file, "--json"):
        file.write_text(json.dumps(finite(value), indent=2) + "\n", encoding="utf-8")


@contextmanager
def writing(file: Path | str, option: str) -> Iterator[None]:
    """Raise UsageError with the name of the option if the block cannot write the file."""
    try:
        yield
    except UsageError:
        raise
    except OSError as error:
        reason = error.strerror or str(error)
        raise UsageError("cannot-write", name=option, file=str(file), reason=reason) from error


_WIDE = 10_000  # characters; no line of a table is longer


def table(
    head: str | Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    left: Iterable[int] = (0,),
    gap: int = 2,
) -> str:
    """Return a text with a line for the head and one for each row. `head`: column names, or a text
    of them separated by " | ". Columns numbered in `left` are left-aligned, others right-aligned.

    A row may have fewer cells than the head. None is an empty cell. If all names are empty, there
    is no head line. `gap`: number of spaces between columns.
    """
    from rich.console import Console  # slow to import
    from rich.table import Table

    names = head.split(" | ") if isinstance(head, str) else head
    grid = Table(box=None, padding=(0, gap, 0, 0), pad_edge=False, show_header=any(names))
    at_the_left = set(left)
    for column, name in enumerate(names):
        grid.add_column(name, justify="left" if column in at_the_left else "right", no_wrap=True)
    for row in rows:
        grid.add_row(*map(_cell, row))
    console = Console(
        file=io.StringIO(),
        width=_WIDE,
        color_system=None,
        markup=False,
        highlight=False,
        emoji=False,
    )
    with console.capture() as captured:
        console.print(grid)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


def _cell(value: object) -> str:
    return "" if value is None else str(value)


def counted(count: int, noun: str, plural: str = "s") -> str:
    """Return a text such as `1 rank` or `3 micro-batches`. `plural`: the ending of the plural."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}{plural}"


def milliseconds(seconds: float) -> str:
    """Return a text such as `12.3 ms`."""
    return f"{1e3 * seconds:.1f} ms"


def percent(share: float) -> str:
    """Return a text such as `98.7 %`."""
    return f"{100 * share:.1f} %"


def megabytes(count: float) -> str:
    """Return a text such as `1.250 MB`."""
    return f"{count / 1e6:.3f} MB"
