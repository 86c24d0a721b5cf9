"""Drawings of boxes, text, lines and arrows, and plots on axes, as SVG. `show`, `bench`, `plan` and
`report` make all their figures with it.

A colour is the name of a CSS variable: var(--blue). An HTML page defines these variables itself. A
standalone file contains the colours of PALETTE and follows the reader's system, light or dark. It
has its own background colour, so that it is legible on any page.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from lockstep.tools.timing.output_files import check_picture, writing

_COLOUR = re.compile(r'\b(fill|stroke)="var\(--(\w+)\)"')
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
WIDTH = 360
"""Width of a plot in units: that of a phone, so that text of 10 units is legible there."""
_FONT = 10  # units: size of the text in a plot
_FULL = 680  # pixels: width of a plot in a standalone file
_EDGE = 9.0  # units: margin of the sheet around plots
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


class Drawing:
    """A sheet that grows with its content. Later shapes cover earlier ones.

    A screen reader reads `title` and `description` in place of a standalone file.
    """

    def __init__(self, title: str = "", description: str = "") -> None:
        self.title = title
        self.description = description
        self._right = 0.0
        self._low = 0.0
        self._shapes: list[str] = []
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
        attributes = {"x": float(x), "y": float(y), "width": float(width), "height": float(height)}
        opacity = None if tint is None else f"{tint:g}"
        more = {"fill": fill, "fill-opacity": opacity, "stroke": stroke, **more}
        self._add("rect", attributes | more, x + width, y + height)

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
        self._add("text", attributes, right, y + 0.3 * size, text)

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

    def legend(
        self,
        y: float,
        meanings: Mapping[str, tuple[str, float]],
        wrap: float,
        *,
        left: float = MARGIN,
        size: float = 12.0,
    ) -> float:
        """Draw a coloured box beside each name of `meanings`, which gives its colour and tint.
        Returns the y below them.
        """
        x = left
        for name, (colour, tint) in meanings.items():
            width = 2.6 * size + width_of(name, size)
            if x > left and x + width > wrap:
                x = left
                y += 1.6 * size
            self.box(x, y, size, size, colour, tint=tint)
            self.words(x + 1.5 * size, y + 0.875 * size, name, size=size)
            x += width
        return y + 1.8 * size

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
        self._add("path", path, *_corner(curve))
        self._head(curve[3], curve[2], colour)
        if both:
            self._head(curve[0], curve[1], colour)

    def _head(self, tip: Point, before: Point, colour: str) -> None:
        """Draw the head of an arrow that points from `before` to `tip`."""
        x, y = tip
        angle = math.atan2(y - before[1], x - before[0])
        points = [tip]
        for side in (angle - 0.42, angle + 0.42):
            points.append((x - 7 * math.cos(side), y - 7 * math.sin(side)))
        self._add("polygon", {"points": _listed(points), "fill": colour}, x, y)

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
            self._add("polyline", attributes, *_corner(points))

    def dot(self, x: float, y: float, radius: float, fill: str, **more: Any) -> None:
        attributes = {"cx": float(x), "cy": float(y), "r": radius, "fill": fill, **more}
        self._add("circle", attributes, x + radius, y + radius)

    def place(self, other: Drawing, x: float, y: float) -> None:
        """Place another drawing with its top left corner at (x, y)."""
        self._shapes += [f'<g transform="translate({x:.1f} {y:.1f})">', *other._shapes, "</g>"]
        self._right = max(self._right, 2 * x + other.width)
        self._low = max(self._low, y + other.height)

    def _add(
        self, tag: str, attributes: Mapping[str, Any], right: float, low: float, text: str = ""
    ) -> None:
        """Add an SVG element; attributes that are None are left out. Extend the sheet to the
        element's `right` and `low` ends.
        """
        parts = [f"<{tag}"]
        for name, value in attributes.items():
            if value is not None:
                parts.append(f' {name}="{_number(value)}"')
        self._shapes.append("".join([*parts, f">{escape(text)}</{tag}>" if text else "/>"]))
        self._extend(tag, right, low)

    def _extend(self, tag: str, right: float, low: float) -> None:
        self._right = max(self._right, right + MARGIN)
        self._low = max(self._low, low + MARGIN)

    def svg(self) -> str:
        """Return the text of a standalone SVG file: with the colours of a light system, and a style
        sheet that replaces them on a dark one.
        """
        width, height = self.width, self.height
        size = f'width="{round(self.zoom * width)}" height="{round(self.zoom * height)}"'
        begin = (
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="0 0 {width} {height}"'
            ' role="img" font-family="Helvetica, Arial, sans-serif">'
        )
        paper = f'<rect width="{width}" height="{height}" rx="6" fill="var(--paper)"/>'
        shapes = "\n".join([paper, *self._shapes])
        rules = []
        for attribute, name in sorted(set(_COLOUR.findall(shapes))):
            light, dark = PALETTE[name]
            rules.append(f'[{attribute}="{light}"]{{{attribute}:{dark}}}')
        title = f"<title>{escape(self.title)}</title>"
        description = f"<desc>{escape(self.description)}</desc>"
        style = f"<style>@media (prefers-color-scheme: dark){{{''.join(rules)}}}</style>"
        shapes = _COLOUR.sub(lambda match: f'{match[1]}="{PALETTE[match[2]][0]}"', shapes)
        return "\n".join([begin, title, description, style, shapes, "</svg>"]) + "\n"

    def inside(self) -> str:
        """Return the SVG element for an HTML page."""
        begin = f'<svg viewBox="0 0 {self.width} {self.height}" role="img" focusable="false">'
        return "\n".join([begin, *self._shapes, "</svg>"])

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


class Plot(Drawing):
    """A plot with a horizontal axis `across` and a vertical axis `up`, each (lowest, highest).
    With `rows` it has a row for each name, from the top, in place of the vertical axis.

    `legend`: colours by name. `log`: the names of the logarithmic axes, such as "across up". The
    plot's other colours are --ink and --faint.
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
        log: str = "",
        title: str = "",
    ) -> None:
        super().__init__(title)
        self._right = WIDTH
        self._log = log.split()
        self.row_height = row_height
        if title:
            self.words(2, 12, title, size=_FONT + 1, weight="bold")
        self._top = 24.0 if title else 6.0
        if legend:
            meanings = {name: (colour, 1.0) for name, colour in legend.items()}
            self._top = self.legend(self._top - 3, meanings, WIDTH, left=2, size=_FONT)
        if up_label:
            self._text(2, self._top + 6, up_label)
            self._top += 14
        self._across = self._range("across", across)
        if rows:
            self._up = (float(len(rows)), 0.0)
            heights = {row + 0.5: name for row, name in enumerate(rows)}
            self._bottom = self._top + row_height * len(rows)
        else:
            self._up = self._range("up", up)
            heights = self._axis_marks("up", up, 5)
            self._bottom = self._top + 130
        self._left = 9 + max(width_of(name, _FONT) for name in heights.values())
        self._end = WIDTH - 12.0
        for value, name in heights.items():
            y = self.y(value)
            self._text(self._left - 5, y + 3.5, name, "end")
            if not rows:
                self.line([(self._left, y), (self._end, y)], FAINT, 0.5)
        marks = self._axis_marks("across", across, 6) if numbers is None else numbers
        for value, name in marks.items():
            self._text(self.x(value), self._bottom + 13, name, "middle")
        self.line([(self._left, self._bottom), (self._end, self._bottom)], FAINT, 1)
        self._text((self._left + self._end) / 2, self._bottom + 27, label, "middle")
        self._right = max(WIDTH, self._right - MARGIN)
        self._low = self._bottom + 32
        self.zoom = _FULL / WIDTH

    def _range(self, axis: str, ends: Point) -> Point:
        if axis in self._log:
            return _widened((math.log10(ends[0]), math.log10(ends[1])))
        return _widened(ends)

    def _axis_marks(self, axis: str, ends: Point, most: int) -> dict[float, str]:
        low, high = self._range(axis, ends)
        if axis not in self._log:
            return _marks(low, high, most)
        powers = range(math.ceil(low - 1e-9), math.floor(high + 1e-9) + 1)
        if not powers:
            return {ends[0]: f"{ends[0]:.3g}"}
        step = -(-len(powers) // most)
        return {10.0**power: f"{10.0**power:g}" for power in powers[::step]}

    def x(self, value: float) -> float:
        share = self._share("across", self._across, value)
        return self._left + share * (self._end - self._left)

    def y(self, value: float) -> float:
        return self._bottom + self._share("up", self._up, value) * (self._top - self._bottom)

    def _share(self, axis: str, ends: Point, value: float) -> float:
        """Return how far along an axis a value is: 0 at its begin, 1 at its end."""
        low, high = ends
        at = math.log10(value) if axis in self._log else value
        return (at - low) / (high - low)

    def bar(
        self, begin: float, end: float, top: float, height: float, fill: str, **more: Any
    ) -> None:
        """Draw a bar from `begin` to `end` on the horizontal axis; `top` and `height` in rows."""
        left = self.x(begin)
        attributes = {"stroke": "none", **more}
        width = self.x(end) - left
        self.box(left, self.y(top), width, height * self.row_height, fill, **attributes)

    def inscribe(self, x: float, row: float, text: str) -> None:
        """Draw text in row `row`, centred at `x` on the horizontal axis."""
        self._text(self.x(x), self.y(row) + 3.5, text, "middle")

    def inscribe_small(self, x: float, row: float, text: str) -> None:
        """Draw small text into a bar that begins at `x`."""
        self.words(self.x(x) + 2, self.y(row) + 2.8, text, size=8, fill="var(--paper)")

    def curve(
        self,
        points: Iterable[Point],
        colour: str,
        *,
        dots: bool = False,
        width: float = 1.5,
        dashes: str | None = None,
    ) -> None:
        """Draw a line through the points, with a gap at each point that is not finite."""
        piece: list[Point] = []
        for x, y in [*points, (math.nan, math.nan)]:
            if math.isfinite(y):
                piece.append((self.x(x), self.y(y)))
                continue
            self.line(piece, colour, width, dashes)
            for cx, cy in piece if dots or len(piece) == 1 else ():
                self.dot(cx, cy, 2, colour)
            piece = []

    def area(self, points: Sequence[Point], colour: str) -> None:
        """Fill the space between a curve and the horizontal axis."""
        outline = [(self.x(x), self.y(y)) for x, y in points]
        outline = [(outline[0][0], self._bottom), *outline, (outline[-1][0], self._bottom)]
        attributes = {"points": _listed(outline), "fill": colour}
        self._add("polygon", attributes, *_corner(outline))

    def stripe(self, begin: float, end: float, colour: str) -> None:
        """Draw a stripe of the plot's full height, from `begin` to `end`."""
        left = self.x(begin)
        width = self.x(end) - left
        height = self._bottom - self._top
        self.box(left, self._top, width, height, colour, tint=0.15, stroke="none")

    def _extend(self, tag: str, right: float, low: float) -> None:
        if tag == "text":
            self._right = max(self._right, right + 2)

    def _text(self, x: float, y: float, text: str, anchor: str = "start") -> None:
        self.words(x, y, text, anchor=anchor, size=_FONT, fill=INK)


def figure(title: str, plots: Sequence[Plot], description: str = "") -> Drawing:
    """Return a drawing of a title and the plots below it, one under the other."""
    sheet = Drawing(title, description)
    y = 6.0
    for line in wrapped(title, WIDTH, 12, "bold"):
        y += 15
        sheet.words(_EDGE + 2, y, line, size=12, weight="bold")
    for plot in plots:
        sheet.place(plot, _EDGE, y + 8)
        y += 8 + plot.height
    sheet.zoom = _FULL / sheet.width
    return sheet


def _widened(ends: Point) -> Point:
    """Return the range `ends`, made 1 long if it is empty."""
    low, high = ends
    return ends if low < high else (low - 0.5, low + 0.5)


def _marks(low: float, high: float, most: int) -> dict[float, str]:
    """Return at most `most` + 1 round numbers from `low` to `high`, each with its label."""
    step = 10.0 ** math.floor(math.log10((high - low) / most))
    for factor in (1, 2, 5, 10):
        if factor * step * most >= high - low:
            step *= factor
            break
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return {count * step: f"{count * step:.10g}" for count in range(first, last + 1)}


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
