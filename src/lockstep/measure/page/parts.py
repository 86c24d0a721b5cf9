"""What the page is made of; `report.html.jinja` knows how each is written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """Texts; the first column names the row."""

    caption: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """A picture, and the same in words and figures for who does not see it."""

    svg: str
    """From svg.py: our own markup, not escaped again."""
    title: str
    caption: str
    """What it shows and in which unit; plain text."""
    table: Table | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    name: str
    """Its anchor."""
    title: str
    text: Sequence[str] = ()
    """Paragraphs, plain."""
    figures: Sequence[Figure] = ()
    tables: Sequence[Table] = ()

    @property
    def empty(self) -> bool:
        return not (self.text or self.figures or self.tables)
