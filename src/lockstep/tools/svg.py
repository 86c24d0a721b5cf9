"""Plots on axes, as SVG: curves over numbers, and bars in rows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lockstep.tools.drawing import FAINT, INK, MARGIN, Drawing, Point, Shape, width_of, wrapped

WIDTH = 360
"""Width of a plot in units: that of a phone, so that text of 10 units is legible there."""
_FONT = 10  # units: size of the text in a plot
_FULL = 680  # pixels: width of a plot in a standalone file
_EDGE = 9.0  # units: margin of the sheet around plots


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
        super().__init__(title, width=WIDTH)
        self._log = log.split()
        self.row_height = row_height
        if title:
            self.words(2, 12, title, size=_FONT + 1, weight="bold")
        self._top = self._legend(legend or {}, 18.0 if title else 0.0)
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
            heights = self._marks("up", up, 5)
            self._bottom = self._top + 130
        self._left = 9 + max(width_of(name, _FONT) for name in heights.values())
        self._end = WIDTH - 12.0
        for value, name in heights.items():
            y = self.y(value)
            self._text(self._left - 5, y + 3.5, name, "end")
            if not rows:
                self.line([(self._left, y), (self._end, y)], FAINT, 0.5)
        marks = self._marks("across", across, 6) if numbers is None else numbers
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

    def _marks(self, axis: str, ends: Point, most: int) -> dict[float, str]:
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

    def stripe(self, begin: float, end: float, colour: str) -> None:
        """Draw a stripe of the plot's full height, from `begin` to `end`."""
        left = self.x(begin)
        width = self.x(end) - left
        height = self._bottom - self._top
        self.box(left, self._top, width, height, colour, tint=0.15, stroke="none")

    def _add(self, shape: Shape, right: float, low: float) -> None:
        self._shapes.append(shape)
        if shape.tag == "text":
            self._right = max(self._right, right + 2)

    def _legend(self, legend: Mapping[str, str], top: float) -> float:
        """Draw the legend. Returns the y below it."""
        if not legend:
            return top + 6
        x = 2.0
        y = top + 11.0
        for name, colour in legend.items():
            width = 22 + width_of(name, _FONT)
            if x > 2 and x + width > WIDTH:
                x = 2.0
                y += 15
            self.box(x, y - 8, 9, 9, colour, stroke="none")
            self._text(x + 13, y, name)
            x += width
        return y + 8

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
