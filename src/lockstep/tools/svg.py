"""Figures as SVG: boxes, words, lines and arrows on a sheet, and plots on axes. Every figure of
`show` and `report` is drawn here.

A colour is whatever CSS takes. Plots lie inside a page and take its variables, so that they follow
its light or dark theme.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from lockstep.errors import UsageError
from lockstep.runtime.extras import missing
from lockstep.tools.timing.output_files import writing

INK, EDGE, ARROW = "#222222", "#777777", "#b5541c"
WIDTH = 360
"""Of a plot: a phone's width, so that 10 units of text can be read there."""
_FONT, _LETTER = 10, 5.6  # of a plot's words: their size, and about the width of a letter
Point = tuple[float, float]
Curve = tuple[Point, Point, Point, Point]


@dataclass(frozen=True, slots=True)
class _Shape:
    tag: str
    attributes: Mapping[str, Any]
    text: str | None = None
    curve: Curve | None = None

    def __str__(self) -> str:
        attributes = "".join(
            f' {name}="{_number(value)}"' for name, value in self.attributes.items()
        )
        return (
            f"<{self.tag}{attributes}/>"
            if self.text is None
            else f"<{self.tag}{attributes}>{escape(self.text)}</{self.tag}>"
        )


class Drawing:
    """A sheet of so many px. What is drawn first lies below."""

    def __init__(self, width: float, height: float) -> None:
        self.width, self.height = round(width), round(height)
        self._shapes: list[_Shape] = []

    def box(self, x: float, y: float, width: float, height: float, fill: str, **more: Any) -> None:
        at = {"x": float(x), "y": float(y), "width": float(width), "height": float(height)}
        self._shapes.append(_Shape("rect", {**at, "fill": fill, "stroke": EDGE, **more}))

    def words(self, x: float, y: float, text: str, *, anchor: str = "start", **font: Any) -> None:
        """One line; `y` is its base. `font`: size in px (13), weight (normal), fill."""
        font = {"size": 13, "weight": "normal", "fill": INK, **font}
        how = {
            "text-anchor": anchor,
            "font-size": font["size"],
            "font-weight": font["weight"],
            "fill": font["fill"],
        }
        self._shapes.append(_Shape("text", {"x": float(x), "y": float(y), **how}, text))

    def arrow(self, curve: Curve, kind: str) -> None:
        """Along a cubic curve from its first point to its last. `kind`: its class."""
        start, bend, back, end = (f"{x:.1f},{y:.1f}" for x, y in curve)
        how = {"fill": "none", "stroke": ARROW, "stroke-width": 1.6, "marker-end": "url(#head)"}
        path = {"class": kind, "d": f"M{start} C{bend} {back} {end}", **how}
        self._shapes.append(_Shape("path", path, curve=curve))

    def svg(self) -> str:
        """As a file of its own."""
        size = (
            f'width="{self.width}" height="{self.height}" viewBox="0 0 {self.width} {self.height}"'
        )
        head = (
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7"'
            ' markerHeight="7" orient="auto"><path d="M0,0 L8,4 L0,8 z"'
            f' fill="{ARROW}"/></marker></defs>'
        )
        sheet = f'<rect width="{self.width}" height="{self.height}" fill="white"/>'
        begin = (
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="Helvetica, Arial,'
            ' sans-serif" font-size="13">'
        )
        return "\n".join([begin, head, sheet, *map(str, self._shapes), "</svg>"]) + "\n"

    def inside(self) -> str:
        """For the inside of an HTML page."""
        begin = f'<svg viewBox="0 0 {self.width} {self.height}" role="img" focusable="false">'
        return "\n".join([begin, *map(str, self._shapes), "</svg>"])

    def save(self, file: Path) -> None:
        """.svg by itself, .png through matplotlib. Raises UsageError for another ending or a
        file that cannot be written.
        """
        if file.suffix not in (".svg", ".png"):
            raise UsageError(
                "wrong-ending", option="--out", file=str(file), endings=[".png", ".svg"]
            )
        with writing(file, "--out"):
            if file.suffix == ".svg":
                file.write_text(self.svg(), encoding="utf-8")
            else:
                self._png(file)

    def _png(self, file: Path) -> None:
        try:
            from matplotlib.figure import Figure
            from matplotlib.patches import FancyArrowPatch, Rectangle
            from matplotlib.path import Path as Vertices
        except ImportError:
            raise missing("a .png", "matplotlib", "plot") from None
        figure = Figure(figsize=(self.width / 100, self.height / 100), dpi=150)
        axes: Any = figure.add_axes((0, 0, 1, 1))
        axes.set(xlim=(0, self.width), ylim=(self.height, 0))
        axes.axis("off")
        for shape in self._shapes:
            at = shape.attributes
            if shape.curve is not None:
                along = Vertices(shape.curve, [Vertices.MOVETO, *3 * [Vertices.CURVE4]])
                look: Any = {
                    "arrowstyle": "-|>",
                    "mutation_scale": 9,
                    "color": ARROW,
                    "linewidth": 1.2,
                }
                axes.add_patch(FancyArrowPatch(path=along, **look))
            elif shape.text is not None:
                side = {"start": "left", "middle": "center", "end": "right"}[at["text-anchor"]]
                font = {
                    "size": 0.72 * at["font-size"],
                    "weight": at["font-weight"],
                    "color": at["fill"],
                }
                axes.text(at["x"], at["y"], shape.text, ha=side, va="baseline", **font)
            else:
                look = {"facecolor": at["fill"], "edgecolor": at["stroke"], "linewidth": 0.8}
                axes.add_patch(Rectangle((at["x"], at["y"]), at["width"], at["height"], **look))
        figure.savefig(file)


class Plot(Drawing):
    """Axes `across`, from a number to a number, and `up`; or, in place of `up`, a row a name from
    the top.

    `legend`: colours by name. The page's variables --ink and --faint are its other colours.
    """

    def __init__(
        self,
        across: Point,
        label: str,
        *,
        up: Point = (0.0, 1.0),
        up_label: str = "",
        rows: Sequence[str] = (),
        row_height: float = 17,
        legend: Mapping[str, str] | None = None,
        numbers: Mapping[float, str] | None = None,
    ) -> None:
        super().__init__(WIDTH, 0)
        top = self._legend(legend or {}) + (14 if up_label else 0)
        high = row_height * len(rows) if rows else 130
        self.height = round(top + high + 32)
        self.row_height = row_height
        self._across = _widened(across)
        self._up = (float(len(rows)), 0.0) if rows else _widened(up)
        named = {place + 0.5: name for place, name in enumerate(rows)}
        upwards = named or _marks(*self._up, 5)
        self._left = 10 + _LETTER * max(map(len, upwards.values()))
        self._right, self._top, self._bottom = WIDTH - 12, top, top + high
        if up_label:
            self._said(2, top - 8, up_label)
        for value, name in upwards.items():
            self._said(self._left - 5, self.y(value) + 3.5, name, "end")
            if not rows:
                y = self.y(value)
                self.line([(self._left, y), (self._right, y)], "var(--faint)", 0.5)
        for value, name in (_marks(*self._across, 6) if numbers is None else numbers).items():
            self._said(self.x(value), self._bottom + 13, name, "middle")
        self.line([(self._left, self._bottom), (self._right, self._bottom)], "var(--faint)", 1)
        self._said((self._left + self._right) / 2, self.height - 5, label, "middle")

    def x(self, value: float) -> float:
        low, high = self._across
        return self._left + (value - low) / (high - low) * (self._right - self._left)

    def y(self, value: float) -> float:
        low, high = self._up
        return self._bottom + (value - low) / (high - low) * (self._top - self._bottom)

    def bar(
        self, begin: float, end: float, top: float, height: float, fill: str, **more: Any
    ) -> None:
        """From a number to a number; `top` and `height` in rows."""
        left, more = self.x(begin), {"stroke": "none", **more}
        self.box(left, self.y(top), self.x(end) - left, height * self.row_height, fill, **more)

    def said(self, x: float, row: float, text: str) -> None:
        """In the middle of a row, at a number."""
        self._said(self.x(x), self.y(row) + 3.5, text, "middle")

    def inscribed(self, x: float, row: float, text: str) -> None:
        """Small, into a bar that begins at `x`."""
        self.words(self.x(x) + 2, self.y(row) + 2.8, text, size=8, fill="var(--paper)")

    def curve(self, points: Iterable[Point], colour: str, *, dots: bool = False) -> None:
        """Through the points, interrupted where one is not finite."""
        piece: list[Point] = []
        for x, y in [*points, (math.nan, math.nan)]:
            if math.isfinite(y):
                piece.append((self.x(x), self.y(y)))
                continue
            self.line(piece, colour, 1.5)
            for cx, cy in piece if dots or len(piece) == 1 else ():
                self._shapes.append(_Shape("circle", {"cx": cx, "cy": cy, "r": 2, "fill": colour}))
            piece = []

    def line(self, points: Sequence[Point], colour: str, width: float) -> None:
        if len(points) > 1:
            through = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
            look = {"fill": "none", "stroke": colour, "stroke-width": width}
            self._shapes.append(_Shape("polyline", {"points": through, **look}))

    def _legend(self, legend: Mapping[str, str]) -> float:
        """Returns where it ends."""
        x, y = 2.0, 11.0
        for name, colour in legend.items():
            width = 22 + _LETTER * len(name)
            if x + width > WIDTH:
                x, y = 2.0, y + 15
            self.box(x, y - 8, 9, 9, colour, stroke="none")
            self._said(x + 13, y, name)
            x += width
        return y + 8 if legend else 6

    def _said(self, x: float, y: float, text: str, anchor: str = "start") -> None:
        self.words(x, y, text, anchor=anchor, size=_FONT, fill="var(--ink)")


def blend(light: str, dark: str, share: float) -> str:
    """A colour between two, both as #rrggbb."""
    ends = zip(bytes.fromhex(light[1:]), bytes.fromhex(dark[1:]), strict=True)
    return "#" + bytes(round(low + share * (high - low)) for low, high in ends).hex()


def _widened(ends: Point) -> Point:
    """A range has a length."""
    low, high = ends
    return ends if low < high else (low - 0.5, low + 0.5)


def _marks(low: float, high: float, most: int) -> dict[float, str]:
    """Round numbers from `low` to `high`, and how they are written."""
    power = 10.0 ** math.floor(math.log10((high - low) / most))
    step = next(power * each for each in (1, 2, 5, 10) if power * each * most >= high - low)
    places = range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)
    return {place * step: f"{place * step:.10g}" for place in places}


def _number(value: Any) -> str:
    return f"{value:.1f}" if isinstance(value, float) else escape(str(value))
