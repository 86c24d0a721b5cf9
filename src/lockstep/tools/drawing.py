"""Drawings of boxes, text, lines and arrows, as SVG. `show`, `bench`, `plan` and `report` make all
their figures with it; svg.py adds plots with axes.

A colour is the name of a CSS variable: var(--blue). An HTML page defines these variables itself. A
standalone file contains PALETTE and follows the reader's system, light or dark. It has its own
background colour, so that it is legible on any page.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from lockstep.tools.timing.output_files import check_picture, writing

PALETTE = {
    "paper": ("#ffffff", "#171b20"),
    "card": ("#f3f5f7", "#22272e"),
    "ink": ("#1b1f24", "#e9ecf0"),
    "soft": ("#57606a", "#a9b1bb"),
    "faint": ("#aab2bc", "#59626d"),
    "blue": ("#1f6fb4", "#6db3f2"),
    "orange": ("#b3541e", "#f0a070"),
    "green": ("#1f7a46", "#58c98b"),
    "purple": ("#7446ab", "#b894f2"),
    "red": ("#b4243f", "#f27a92"),
    "teal": ("#0f7278", "#4cc5cc"),
    "gold": ("#8a6100", "#e0b040"),
    "grey": ("#5b6570", "#98a2ad"),
}
"""Colours in a standalone file: (on a light system, on a dark system)."""
SERIES = tuple(
    f"var(--{name})"
    for name in ("blue", "orange", "green", "purple", "red", "teal", "gold", "grey")
)
INK = "var(--ink)"
SOFT = "var(--soft)"
FAINT = "var(--faint)"
CARD = "var(--card)"
ARROW = "var(--orange)"
TINT = 0.22
"""Opacity of a colour behind text, so that the text stays legible."""
MARGIN = 14.0
Point = tuple[float, float]
Curve = tuple[Point, Point, Point, Point]


def width_of(text: str, size: float, weight: str = "normal") -> float:
    """Estimate the width of a line of text; a wide font is assumed."""
    ems = sum(_ems(character) for character in text)
    return size * ems * (1.08 if weight == "bold" else 1.0)


def _ems(character: str) -> float:
    if character in "iljtfrI.,:;'|!()[] ":
        return 0.36
    return 0.95 if character in "mwMW%@" else 0.66


@dataclass(frozen=True, slots=True)
class Shape:
    tag: str
    attributes: Mapping[str, Any]
    text: str | None = None

    def markup(self, alone: bool) -> str:
        """Return the SVG element. `alone`: for a standalone file, whose colours are literal."""
        attributes = dict(self.attributes)
        if alone:
            _make_literal(attributes)
        parts = [f"<{self.tag}"]
        for name, value in attributes.items():
            if value is not None:
                parts.append(f' {name}="{_number(value)}"')
        if self.text is None:
            return "".join([*parts, "/>"])
        return "".join([*parts, f">{escape(self.text)}</{self.tag}>"])


def _make_literal(attributes: dict[str, Any]) -> None:
    """Replace colours that are CSS variables by those on a light system. Add a class for each, such
    as `f-blue` or `s-blue`, by which the style sheet sets the colour on a dark system.
    """
    classes = [attributes.pop("class", None)]
    for paint in ("fill", "stroke"):
        colour = str(attributes.get(paint))
        if match := re.fullmatch(r"var\(--(\w+)\)", colour):
            name = match[1]
            attributes[paint] = PALETTE[name][0]
            classes.append(f"{paint[0]}-{name}")
    attributes["class"] = " ".join(filter(None, classes)) or None


@dataclass(frozen=True, slots=True)
class Moved:
    """Shapes that are moved together, by (x, y)."""

    x: float
    y: float
    shapes: Sequence[Shape | Moved]

    def markup(self, alone: bool) -> str:
        begin = f'<g transform="translate({self.x:.1f} {self.y:.1f})">'
        return "\n".join([begin, *_markup(self.shapes, alone), "</g>"])


def _markup(shapes: Sequence[Shape | Moved], alone: bool) -> list[str]:
    return [shape.markup(alone) for shape in shapes]


class Drawing:
    """A sheet that grows with its content, and has at least the given `width` and `height`. Later
    shapes cover earlier ones.

    A screen reader reads `title` and `description` in place of a standalone file.
    """

    def __init__(
        self, title: str = "", description: str = "", *, width: float = 0, height: float = 0
    ) -> None:
        self.title = title
        self.description = description
        self._right = width
        self._low = height
        self._shapes: list[Shape | Moved] = []
        self.zoom = 1.0
        """Pixels per unit in a standalone file."""

    @property
    def width(self) -> int:
        return math.ceil(self._right)

    @property
    def height(self) -> int:
        return math.ceil(self._low)

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        fill: str,
        *,
        tint: float | None = None,
        stroke: str = FAINT,
        **more: Any,
    ) -> None:
        """Draw a rectangle. `tint`: the opacity of its colour, from 0 to 1."""
        attributes = {
            "x": float(x),
            "y": float(y),
            "width": float(width),
            "height": float(height),
            "fill": fill,
            "fill-opacity": None if tint is None else f"{tint:g}",
            "stroke": stroke,
            **more,
        }
        self._add(Shape("rect", attributes), x + width, y + height)

    def words(
        self,
        x: float,
        y: float,
        text: str,
        *,
        anchor: str = "start",
        size: float = 13,
        weight: str = "normal",
        fill: str = INK,
    ) -> None:
        """Draw one line of text; `y` is its baseline, `size` is in units."""
        attributes = {
            "x": float(x),
            "y": float(y),
            "text-anchor": anchor,
            "font-size": size,
            "font-weight": None if weight == "normal" else weight,
            "fill": fill,
        }
        share_to_the_right = {"start": 1.0, "middle": 0.5, "end": 0.0}[anchor]
        right = x + share_to_the_right * width_of(text, size, weight)
        self._add(Shape("text", attributes, text), right, y + 0.3 * size)

    def heading(self, lines: Sequence[str], *, wrap: float = 0) -> float:
        """Draw the first line as a bold title, and the others under it; wrap lines wider than
        `wrap`. Returns the y below them.
        """
        y = MARGIN
        for number, line in enumerate(lines):
            size, weight = (14, "bold") if number == 0 else (12, "normal")
            for part in wrapped(line, wrap or math.inf, size, weight):
                y += 1.4 * size
                self.words(MARGIN, y, part, size=size, weight=weight)
        return y + 10

    def legend(self, y: float, meanings: Mapping[str, tuple[str, float]], wrap: float) -> float:
        """Draw a coloured box beside each name of `meanings`, which gives its colour and tint.
        Returns the y below them.
        """
        x = MARGIN
        for name, (colour, tint) in meanings.items():
            width = 18 + width_of(name, 12) + 14
            if x > MARGIN and x + width > wrap:
                x = MARGIN
                y += 19
            self.box(x, y, 12, 12, colour, tint=tint)
            self.words(x + 18, y + 10.5, name, size=12)
            x += width
        return y + 22

    def note(self, y: float, text: str, wrap: float, fill: str = SOFT) -> float:
        """Draw small text at the left, wrapped at `wrap`; `y` is the baseline of the first line.
        Returns the baseline of the last line.
        """
        lines = wrapped(text, wrap, 12)
        for number, line in enumerate(lines):
            self.words(MARGIN, y + 17 * number, line, size=12, fill=fill)
        return y + 17 * (len(lines) - 1)

    def arrow(self, curve: Curve, kind: str, colour: str = ARROW, *, both: bool = False) -> None:
        """Draw an arrow along a cubic curve, with a head at its last point, or at `both` ends.
        `kind`: its CSS class.
        """
        start, bend, back, end = (f"{x:.1f},{y:.1f}" for x, y in curve)
        path = {
            "class": kind,
            "d": f"M{start} C{bend} {back} {end}",
            "fill": "none",
            "stroke": colour,
            "stroke-width": 1.6,
        }
        self._add(Shape("path", path), *_corner(curve))
        self._head(curve[3], curve[2], colour)
        if both:
            self._head(curve[0], curve[1], colour)

    def _head(self, tip: Point, before: Point, colour: str) -> None:
        """Draw the head of an arrow that points from `before` to `tip`."""
        x, y = tip
        angle = math.atan2(y - before[1], x - before[0])
        points = [tip]
        for turn in (-0.42, 0.42):
            side = angle + turn
            points.append((x - 7 * math.cos(side), y - 7 * math.sin(side)))
        self._add(Shape("polygon", {"points": _listed(points), "fill": colour}), x, y)

    def line(
        self, points: Sequence[Point], colour: str, width: float, dashes: str | None = None
    ) -> None:
        if len(points) > 1:
            attributes = {
                "points": _listed(points),
                "fill": "none",
                "stroke": colour,
                "stroke-width": width,
                "stroke-dasharray": dashes,
            }
            self._add(Shape("polyline", attributes), *_corner(points))

    def dot(self, x: float, y: float, radius: float, fill: str, **more: Any) -> None:
        shape = Shape("circle", {"cx": float(x), "cy": float(y), "r": radius, "fill": fill, **more})
        self._add(shape, x + radius, y + radius)

    def place(self, other: Drawing, x: float, y: float) -> None:
        """Place another drawing with its top left corner at (x, y)."""
        self._shapes.append(Moved(x, y, other._shapes))
        self._right = max(self._right, 2 * x + other.width)
        self._low = max(self._low, y + other.height)

    def _add(self, shape: Shape, right: float, low: float) -> None:
        self._shapes.append(shape)
        self._right = max(self._right, right + MARGIN)
        self._low = max(self._low, low + MARGIN)

    def svg(self) -> str:
        """Return the text of a standalone SVG file."""
        width, height = self.width, self.height
        size = f'width="{round(self.zoom * width)}" height="{round(self.zoom * height)}"'
        begin = (
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="0 0 {width} {height}"'
            ' role="img" font-family="Helvetica, Arial, sans-serif">'
        )
        paper = {"width": width, "height": height, "rx": 6, "fill": "var(--paper)"}
        shapes = _markup([Shape("rect", paper), *self._shapes], True)
        title = f"<title>{escape(self.title)}</title>"
        description = f"<desc>{escape(self.description)}</desc>"
        lines = [begin, title, description, _dark_style("".join(shapes)), *shapes, "</svg>"]
        return "\n".join(lines) + "\n"

    def inside(self) -> str:
        """Return the SVG element for an HTML page."""
        begin = f'<svg viewBox="0 0 {self.width} {self.height}" role="img" focusable="false">'
        return "\n".join([begin, *_markup(self._shapes, False), "</svg>"])

    def enlarge(self, width: float, most: float) -> None:
        """Make a standalone file `width` pixels wide, but at most `most` times as large as the
        sheet, and never smaller.
        """
        self.zoom = max(1.0, min(most, width / self.width))

    def save(self, file: Path | str) -> None:
        """Write a standalone file. Raises UsageError if its name does not end in .svg, or if it
        cannot be written.
        """
        file = Path(file)
        check_picture(file)
        with writing(file, "--out"):
            file.write_text(self.svg(), encoding="utf-8")


def _dark_style(shapes: str) -> str:
    """Return the style sheet with the colours, on a dark system, of the classes in `shapes`."""
    classes = " ".join(re.findall(r' class="([^"]*)"', shapes))  # text is escaped
    rules = []
    for name in sorted(set(re.findall(r"\b[fs]-\w+", classes))):
        paint = "fill" if name.startswith("f-") else "stroke"
        rules.append(f".{name}{{{paint}:{PALETTE[name[2:]][1]}}}")
    return f"<style>@media (prefers-color-scheme: dark){{{''.join(rules)}}}</style>"


def wrapped(text: str, most: float, size: float, weight: str = "normal") -> list[str]:
    """Break a text between words into lines of at most `most` units."""
    lines: list[str] = []
    for word in text.split(" "):
        if lines and width_of(f"{lines[-1]} {word}", size, weight) <= most:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines


def _listed(points: Sequence[Point]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def _corner(points: Sequence[Point]) -> Point:
    """Return the smallest x and y that no point exceeds."""
    return max(x for x, _ in points), max(y for _, y in points)


def _number(value: Any) -> str:
    return f"{value:.1f}" if isinstance(value, float) else escape(str(value))
