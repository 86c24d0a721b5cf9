"""A schedule as a drawing: a column a rank, a row a step; boxes are cells, darker the more ranks are counted in them; arrows are messages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from lockstep.collectives.draw import SHOWN, Step, complete, letter, steps, title
from lockstep.collectives.prove import prove
from lockstep.collectives.schedule import REDUCING, Schedule
from lockstep.errors import UsageError
from lockstep.extras import install

_FEW, _MANY, _DONE = (222, 235, 247), (107, 160, 210), (161, 217, 155)  # light blue to blue; green when complete
_INK, _ARROW, _EMPTY = "#222222", "#b5541c", "#f4f4f4"
_TOP, _LEFT, _BOX, _GAP = 118, 86, 30, 74  # px: above the first row, left of the first column, a box's height, between two rows


@dataclass(frozen=True, slots=True)
class _Place:
    """Where things are: columns of `width` px with `cell` px a box."""

    schedule: Schedule
    width: float
    cell: float

    def left(self, rank: int) -> float:
        return _LEFT + rank * (self.width + 34)

    def top(self, step: int) -> float:
        return _TOP + step * (_BOX + _GAP)

    def middle(self, rank: int, cell: int) -> float:
        return self.left(rank) + (cell + 0.5) * self.cell


def svg(schedule: Schedule) -> str:
    """The drawing as SVG. Raises UsageError for more ranks than fit on a page."""
    if schedule.world > SHOWN or schedule.cells > SHOWN:
        raise UsageError(
            f"{schedule.world} ranks with {schedule.cells} cells each do not fit in a drawing: up to {SHOWN} do; the text form shows more"
        )
    cell = max(38.0, 24.0 + 8.0 * (schedule.world if schedule.kind in REDUCING else 2))
    place = _Place(schedule, cell * schedule.cells, cell)
    every = list(steps(schedule))
    width = place.left(schedule.world) + 20
    height = place.top(len(every) - 1) + _BOX + 40
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}" '
        'font-family="Helvetica, Arial, sans-serif" font-size="13">',
        f'<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        f'<path d="M0,0 L8,4 L0,8 z" fill="{_ARROW}"/></marker></defs>',
        f'<rect width="{width:.0f}" height="{height:.0f}" fill="white"/>',
    ]
    first, *others = title(schedule, prove(schedule))
    parts.append(words(20, 28, first, size=17, weight="bold"))
    parts += [words(20, 48 + 18 * number, line) for number, line in enumerate(others)]
    for rank in range(schedule.world):
        parts.append(words(place.left(rank) + place.width / 2, _TOP - 12, f"rank {rank}", anchor="middle", weight="bold"))
    for step in every:
        parts += _row(place, step)
    for step in every[1:]:
        parts += _arrows(place, step)
    legend = (
        "a box: cell and the ranks counted in it, green when complete; an arrow from between boxes takes several along"
        if schedule.kind in REDUCING
        else "a box: a cell that is there; empty: not there"
    )
    parts.append(words(20, height - 10, legend, size=12))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _row(place: _Place, step: Step) -> list[str]:
    top = place.top(step.number)
    parts = [words(20, top + 20, f"step {step.number}" if step.number else "start", weight="bold")]
    for rank, held in enumerate(step.held):
        for cell in range(place.schedule.cells):
            ranks = held.get(cell)
            x = place.left(rank) + cell * place.cell
            parts.append(
                f'<rect x="{x:.1f}" y="{top}" width="{place.cell:.1f}" height="{_BOX}" fill="{_colour(place.schedule, cell, ranks)}" stroke="#777"/>'
            )
            if ranks is not None:
                inside = "".join(map(str, sorted(ranks))) if place.schedule.world <= 10 else str(len(ranks))
                parts.append(words(x + place.cell / 2, top + 20, f"{letter(cell)} {inside}", anchor="middle", size=12))
    return parts


def _arrows(place: _Place, step: Step) -> list[str]:
    parts = []
    above, below = place.top(step.number - 1) + _BOX, place.top(step.number)
    for transfer in step.transfers:
        first, last = transfer.cells[0], transfer.cells[-1]
        start = (place.middle(transfer.src, first) + place.middle(transfer.src, last)) / 2
        end = (place.middle(transfer.dst, first) + place.middle(transfer.dst, last)) / 2
        parts.append(
            f'<path class="message" d="M{start:.1f},{above + 3} C{start:.1f},{above + 34} {end:.1f},{below - 36} {end:.1f},{below - 3}" fill="none" '
            f'stroke="{_ARROW}" stroke-width="1.6" marker-end="url(#head)"/>'
        )
    how = "add" if step.transfers and step.transfers[0].reduce else "replace"
    parts.append(words(20, above + _GAP / 2 + 4, how, size=12))
    return parts


def _colour(schedule: Schedule, cell: int, ranks: frozenset[int] | None) -> str:
    if ranks is None:
        return _EMPTY
    if schedule.kind in REDUCING and complete(schedule, cell, ranks):
        return _rgb(_DONE)
    share = (len(ranks) - 1) / max(1, schedule.world - 1) if schedule.kind in REDUCING else 0.4
    return _rgb(tuple(round(low + share * (high - low)) for low, high in zip(_FEW, _MANY, strict=True)))


def _rgb(colour: tuple[int, ...]) -> str:
    return "#" + "".join(f"{part:02x}" for part in colour)


def words(x: float, y: float, text: str, *, anchor: str = "start", size: int = 13, weight: str = "normal") -> str:
    """A line of text in a drawing."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" font-weight="{weight}" fill="{_INK}">{escape(text)}</text>'


def write(schedule: Schedule, file: Path) -> None:
    """Write the drawing of a schedule. Raises UsageError as `save`."""
    save(lambda: svg(schedule), file)


def save(draw: Callable[[], str], file: Path) -> None:
    """Write a drawing, given as SVG: .svg by itself, .png through matplotlib. Raises UsageError for another ending or a file that cannot be written."""
    if file.suffix not in (".svg", ".png"):
        raise UsageError(f"--out {file}: give a file that ends in .svg or .png")
    try:
        if file.suffix == ".svg":
            file.write_text(draw(), encoding="utf-8")
        else:
            _png(draw(), file)
    except OSError as error:
        raise UsageError(f"--out {file} cannot be written: {error.strerror or error}") from error


def _png(drawing: str, file: Path) -> None:
    """The same picture by matplotlib: read back from the SVG, so that there is one drawing."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
        from matplotlib.patches import FancyArrowPatch, Rectangle
        from matplotlib.path import Path as Curve
    except ImportError:
        raise UsageError(f"a .png needs matplotlib: {install('plot')}, or write an .svg") from None
    import xml.etree.ElementTree as tree

    root = tree.fromstring(drawing)
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    figure = plt.figure(figsize=(width / 100, height / 100), dpi=150)
    axis: Any = figure.add_axes((0, 0, 1, 1))
    axis.set(xlim=(0, width), ylim=(height, 0))
    axis.axis("off")
    for element in root:
        kind, at = element.tag.rpartition("}")[2], element.attrib
        if kind == "rect" and "x" in at:
            box = Rectangle(
                (float(at["x"]), float(at["y"])),
                float(at["width"]),
                float(at["height"]),
                facecolor=at["fill"],
                edgecolor="#777777",
                linewidth=0.8,
            )
            axis.add_patch(box)
        elif kind == "text":
            align = {"start": "left", "middle": "center"}[at["text-anchor"]]
            axis.text(
                float(at["x"]),
                float(at["y"]),
                element.text,
                ha=align,
                va="baseline",
                fontsize=float(at["font-size"]) * 0.72,
                fontweight=at["font-weight"],
                color=at["fill"],
            )
        elif kind == "path":
            points = [tuple(map(float, pair.split(","))) for pair in at["d"].replace("M", "").replace("C", "").split()]
            curve = Curve(points, [Curve.MOVETO, Curve.CURVE4, Curve.CURVE4, Curve.CURVE4])
            axis.add_patch(FancyArrowPatch(path=curve, arrowstyle="-|>", mutation_scale=9, color=at["stroke"], linewidth=1.2))
    figure.savefig(file)
    plt.close(figure)
