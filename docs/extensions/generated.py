"""Pages that a build writes, beside the committed ones, ignored by git."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path


def write(folder: Path, pages: Mapping[str, str]) -> None:
    """Make `folder` hold these pages and no other, by their names within it. A page that has
    not changed is left alone, so that the next build does not read it again.
    """
    for old in [*folder.rglob("*.rst"), *folder.rglob("*.markdown")]:
        if str(old.relative_to(folder)) not in pages:
            old.unlink()
    for name, text in pages.items():
        write_page(folder / name, text)


def write_page(page: Path, text: str) -> None:
    """Write a page, unless it has this text already."""
    page.parent.mkdir(parents=True, exist_ok=True)
    if not page.exists() or page.read_text(encoding="utf-8") != text:
        page.write_text(text, encoding="utf-8")


def title(text: str, underline: str = "=") -> str:
    """A heading."""
    return f"{text}\n{underline * len(text)}\n"


def escaped(text: str) -> str:
    """Plain text as reStructuredText; `code` between backticks stays code."""
    pieces = re.split(r"`([^`]+)`", text)
    pieces[::2] = [re.sub(r"([\\*`|_<>])", r"\\\1", each) for each in pieces[::2]]
    pieces[1::2] = [f"``{each}``" for each in pieces[1::2]]
    return "".join(pieces)
