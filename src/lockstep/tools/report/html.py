"""The parts of the page, and their rendering as HTML with report.html.jinja and style.css. Every
text is escaped.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any


@dataclass(frozen=True, slots=True)
class Numbers:
    """A table of texts; the first column names the row."""

    caption: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True)
class Illustration:
    """A figure, with its content in words and numbers for readers who cannot see it."""

    title: str
    svg: str
    """Markup from tools/drawing.py, which is not escaped again."""
    caption: str
    """What the figure shows and in which unit; plain text."""
    table: Numbers


@dataclass(frozen=True, slots=True)
class Section:
    name: str
    """The section's anchor."""
    title: str
    figures: Sequence[Illustration]
    text: str = ""
    """A paragraph of plain text."""
    folded: bool = False
    """Whether only the title is visible at first; on paper everything is visible."""


def render(**values: Any) -> str:
    """Render the page."""
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup, escape

    def said(sentence: str) -> Markup:
        """Escape a sentence; options and percentages in it do not break over lines."""
        text = str(escape(sentence)).replace(" %", "&nbsp;%")
        return Markup(re.sub(r"--[a-z-]+( [\w.]+(?=:))?", r"<code>\g<0></code>", text))

    here = files("lockstep.tools.report")
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["said"] = said
    page = here.joinpath("report.html.jinja").read_text(encoding="utf-8")
    style = here.joinpath("style.css").read_text(encoding="utf-8")
    return environment.from_string(page).render(style=style, **values)
