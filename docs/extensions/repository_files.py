"""Links to files of the repository that are no pages. On GitHub they lead to the file; in the site
they lead to a page that shows it: a build writes one for each file that is linked.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from generated import title, write
from sphinx.application import Sphinx

_LINK = re.compile(r"(!?\[(?:[^\[\]]|\[[^\]]*\])*\])\(([^()\s#:]+)(#[^()\s]*)?\)")
_FENCED = re.compile(r"(^ *```.*?^ *```)", re.MULTILINE | re.DOTALL)
_LANGUAGES = {".py": "python", ".toml": "toml", ".yaml": "yaml", ".json": "json", ".sh": "bash"}
_DOWNLOADS = (".svg", ".png", ".ipynb")  # links to these are left to MyST
_ITSELF = ("explore/index.html",)  # offered as it is, not shown as source


class Files:
    """Which files of the repository the pages link to."""

    def __init__(self, docs: Path) -> None:
        self._docs, self._root = docs.resolve(), docs.resolve().parent

    def pages(self) -> dict[str, str]:
        """Within docs/files: a page for each file or folder that a page of docs/ links to."""
        wanted = {
            target
            for page in sorted(self._docs.rglob("*.md"))
            for target in self._targets(page.parent, page.read_text(encoding="utf-8"))
        }
        found: dict[str, str] = {}
        while wanted:
            target = wanted.pop()
            name = self._name(target)
            if name not in found:
                found[name] = self._shown(target)
                wanted |= set(self._inside(target))
                if target.suffix == ".md":
                    wanted |= set(self._targets(target.parent, target.read_text(encoding="utf-8")))
        return found

    def rewritten(self, text: str, folder: Path, page: Path) -> str:
        """`text` of a file in `folder`, as a part of `page`: with links that work there."""

        def link(match: re.Match[str]) -> str:
            label, to, anchor = match[1], match[2], match[3] or ""
            target = self._resolved(folder, to)
            if target is None:
                return match[0]
            if label.startswith("!") or target.suffix in _DOWNLOADS:
                return f"{label}({os.path.relpath(target, page.parent)})"
            if self._is_page(target):
                return f"{label}({os.path.relpath(target, page.parent)}{anchor})"
            if target.is_relative_to(self._docs) and str(target.relative_to(self._docs)) in _ITSELF:
                return f'<a href="{os.path.relpath(target, page.parent)}">{label[1:-1]}</a>'
            shown = self._docs / "files" / self._name(target)
            return f"{label}({os.path.relpath(shown, page.parent)})"

        pieces = _FENCED.split(text)
        pieces[::2] = [_LINK.sub(link, each) for each in pieces[::2]]
        return "".join(pieces)

    def _targets(self, folder: Path, text: str) -> Iterator[Path]:
        for each in _FENCED.split(text)[::2]:
            for label, to, _ in _LINK.findall(each):
                target = self._resolved(folder, to)
                if target is None or not self._is_source(target) or label.startswith("!"):
                    continue
                if str(target.relative_to(self._root)) not in (f"docs/{each}" for each in _ITSELF):
                    yield target

    def _resolved(self, folder: Path, to: str) -> Path | None:
        """A file or folder of the repository that is there; Sphinx looks after other links."""
        target = Path(os.path.normpath(folder / to))
        return target if target.exists() and target.is_relative_to(self._root) else None

    def _is_source(self, target: Path) -> bool:
        """Whether a page shows it."""
        return not self._is_page(target) and target.suffix not in _DOWNLOADS

    def _is_page(self, target: Path) -> bool:
        return target.suffix in (".md", ".rst") and target.is_relative_to(self._docs)

    def _name(self, target: Path) -> str:
        name = str(target.relative_to(self._root))
        suffix = "markdown" if target.suffix == ".md" else "rst"  # .md would be a page of docs/
        return f"{name}/index.rst" if target.is_dir() else f"{name}.{suffix}"

    def _inside(self, target: Path) -> list[Path]:
        """What is listed on a folder's page."""
        if not target.is_dir():
            return []
        hidden = ("__pycache__", "_build", "files")
        return sorted(
            each
            for each in target.iterdir()
            if not each.name.startswith(".")
            and each.name not in hidden
            and (each.is_dir() or each.suffix in (*_LANGUAGES, ".md", ".txt"))
        )

    def _shown(self, target: Path) -> str:
        name = target.relative_to(self._root)
        head = f":orphan:\n:nosearch:\n\n{title(str(name))}\n"
        here = self._docs / "files" / self._name(target)
        if target.is_dir():
            rows = [
                f"- :doc:`{each.name} <{self._within(here, each)}>`"
                for each in self._inside(target)
            ]
            return head + "\n".join(rows) + "\n"
        source = os.path.relpath(target, here.parent)
        if target.suffix == ".md":
            text = self.rewritten(target.read_text(encoding="utf-8"), target.parent, here)
            return f"---\norphan: true\n---\n\n{text}"
        language = _LANGUAGES.get(target.suffix, "text")
        return f"{head}.. literalinclude:: {source}\n   :language: {language}\n"

    def _within(self, page: Path, target: Path) -> str:
        shown = self._docs / "files" / self._name(target)
        return os.path.relpath(shown, page.parent).removesuffix(".rst").removesuffix(".markdown")


def setup(app: Sphinx) -> dict[str, bool]:
    docs = Path(app.srcdir)
    files = Files(docs)

    def read(_: Sphinx, name: str, content: list[str]) -> None:
        page = docs / f"{name}.md"
        if page.exists():
            content[0] = files.rewritten(content[0], page.parent, page)

    app.connect("builder-inited", lambda _: write(docs / "files", files.pages()))
    app.connect("source-read", read)
    return {"parallel_read_safe": True}
