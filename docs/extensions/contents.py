"""The pages that a section's README lists stand under it in the navigation, in the README's order."""

from __future__ import annotations

import re

from sphinx.application import Sphinx

SECTIONS = ("course/README", "how-to/README", "guide/README")
_PAGE = re.compile(r"\]\(([a-z0-9-]+)\.md\)")  # a link to a page of the same folder


def listed(text: str) -> list[str]:
    """The pages of its own folder that a README links to, each once."""
    return list(dict.fromkeys(_PAGE.findall(text)))


def put_under(app: Sphinx, name: str, content: list[str]) -> None:
    """A toctree that a reader of the README elsewhere does not see."""
    if name in SECTIONS:
        pages = "\n".join(listed(content[0]))
        content[0] += f"\n\n```{{toctree}}\n:hidden:\n\n{pages}\n```\n"


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("source-read", put_under)
    return {"parallel_read_safe": True}
