"""matplotlib's pictures as SVG inside the page, whose colours are the page's: they follow its light or dark theme.

A figure is drawn in stand-in colours, one for each variable of style.css, which are then replaced by the variables.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from typing import Any

from lockstep.errors import UsageError
from lockstep.extras import install

INK, FAINT, PAPER, ACCENT, SECOND = "#010101", "#010102", "#010103", "#010104", "#010105"
PHASE_COLOURS: Mapping[str, str] = {
    "data": "#010201",
    "forward": "#010202",
    "backward": "#010203",
    "moving": "#010204",
    "waits": "#010205",
    "optimizer": "#010206",
    "checks": "#010207",
    "other": "#010208",
}
_VARIABLES = {INK: "ink", FAINT: "faint", PAPER: "paper", ACCENT: "accent", SECOND: "second"} | {
    colour: phase for phase, colour in PHASE_COLOURS.items()
}
WIDTH = 5.0
"""Inches, which is 360 units of the picture: a phone's width, so that 10 units of text can be read there."""
_STYLE = {
    "svg.fonttype": "none",
    "font.size": 10,
    "axes.titlesize": 10,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.facecolor": "none",
    "grid.color": FAINT,
    "grid.linewidth": 0.5,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "lines.linewidth": 1.5,
    "savefig.facecolor": "none",
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "path.simplify_threshold": 0.5,
}


class Picture:
    """One pair of axes, `axes`, on which to draw with the colours above. `name` is unlike that of any other picture on the page."""

    def __init__(self, name: str, height: float) -> None:
        matplotlib, figure = _matplotlib()
        self._matplotlib, self._name = matplotlib, name
        with matplotlib.rc_context({**_STYLE, "svg.hashsalt": name}):
            self._figure = figure(figsize=(WIDTH, height), layout="constrained")
            self.axes: Any = self._figure.subplots()

    def legend(self, columns: int = 4) -> None:
        """Above the axes."""
        with self._matplotlib.rc_context(_STYLE):
            self._figure.legend(loc="outside upper left", ncols=columns, handlelength=1, columnspacing=1)

    def svg(self) -> str:
        """For the inside of an HTML page."""
        file = io.StringIO()
        with self._matplotlib.rc_context({**_STYLE, "svg.hashsalt": self._name}):
            self._figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
        return themed(file.getvalue(), self._name)


def themed(text: str, name: str) -> str:
    """matplotlib's SVG without what belongs to a file of its own, ids made unlike other pictures', colours made the page's."""
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r'<svg [^>]*?(viewBox="[^"]*")[^>]*>', r'<svg \1 role="img" focusable="false">', text, count=1)
    text = re.sub(r'\bid="', f'id="{name}-', text)
    text = re.sub(r'(?:xlink:)?href="#', f'href="#{name}-', text)
    text = text.replace("url(#", f"url(#{name}-")
    text = re.sub(
        r"font: ([\d.]+px) [^;\"]*", r"font-size: \1", re.sub(r"font-family: [^;\"]*;? ?", "", text)
    )  # as old and new matplotlib write
    for colour, variable in _VARIABLES.items():
        text = text.replace(colour, f"var(--{variable})")
    return re.sub(r"\n\s*", "\n", text).strip()


def _matplotlib() -> Any:
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise UsageError(f"the page's figures need matplotlib: {install('plot')}") from None
    return matplotlib, Figure
