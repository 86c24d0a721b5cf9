"""What the page is made of, and how it becomes HTML: report.html.jinja and style.css filled in,
every text escaped.
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
    """A figure, and the same in words and numbers for who does not see it."""

    title: str
    svg: str
    """From tools/svg.py: our own markup, not escaped again."""
    caption: str
    """What it shows and in which unit; plain text."""
    table: Numbers


@dataclass(frozen=True, slots=True)
class Section:
    name: str
    """Its anchor."""
    title: str
    text: Sequence[str] = ()
    """Paragraphs, plain."""
    figures: Sequence[Illustration] = ()
    tables: Sequence[Numbers] = ()
    folded: bool = True
    """Whether only its title is seen at first; on paper all is."""

    @property
    def empty(self) -> bool:
        return not (self.text or self.figures or self.tables)


def render(**what: Any) -> str:
    """The page."""
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup, escape

    def said(sentence: str) -> Markup:
        """Options and per cents do not break over lines."""
        text = str(escape(sentence)).replace(" %", "&nbsp;%")
        return Markup(re.sub(r"--[a-z-]+( [\w.]+(?=:))?", r"<code>\g<0></code>", text))

    here = files("lockstep.tools.report")
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["said"] = said
    template = environment.from_string(
        here.joinpath("report.html.jinja").read_text(encoding="utf-8")
    )
    return template.render(style=here.joinpath("style.css").read_text(encoding="utf-8"), **what)
