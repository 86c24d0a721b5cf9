"""Lessons as notebooks, made from their text and offered at the top of each; and the explorable
page, copied as it is.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import jupytext
from sphinx.application import Sphinx


def notebooks(app: Sphinx) -> None:
    """A notebook beside each lesson."""
    for lesson in sorted(Path(app.srcdir).glob("course/lesson*.md")):
        jupytext.write(jupytext.read(lesson), lesson.with_suffix(".ipynb"))


def offer(app: Sphinx, name: str, content: list[str]) -> None:
    """Put the link under a lesson's title."""
    if not name.startswith("course/lesson"):
        return
    title, _, rest = content[0].partition("\n")
    file = f"{Path(name).name}.ipynb"
    content[0] = f"{title}\n\n{{download}}`Download this lesson as a notebook <{file}>`\n{rest}"


def copy_explorable_page(app: Sphinx, exception: Exception | None) -> None:
    """docs/explore is self-contained."""
    page = Path(app.srcdir) / "explore/index.html"
    if exception is None and page.exists():
        (Path(app.outdir) / "explore").mkdir(exist_ok=True)
        shutil.copy(page, Path(app.outdir) / "explore")


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("builder-inited", notebooks)
    app.connect("source-read", offer)
    app.connect("build-finished", copy_explorable_page)
    return {"parallel_read_safe": True}
