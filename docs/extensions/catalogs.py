"""The reference of options and of errors: a page for each, from the code."""

from __future__ import annotations

from typing import Any

from generated import write_page
from sphinx.application import Sphinx

from lockstep.cli import explain
from lockstep.cli.choices import Cluster, RunChoice
from lockstep.config.knob import GROUPS, Field, knobs
from lockstep.config.launching import Launch
from lockstep.config.settings import Config
from lockstep.errors import catalog

_HEAD = "`--config FILE` reads these options from a file ([more](README.md#options))."
TRAIN = (RunChoice, Config, Launch, Cluster)
"""What declares the options of `lockstep train`."""


def options(*declaring: type[Any]) -> str:
    """The page of the options that these dataclasses declare, in a table for each group."""
    fields = [field for dataclass in declaring for field in knobs(dataclass).values()]
    parts = ["# Options\n", f"{_HEAD}\n"]
    for group in GROUPS:
        if rows := [_row(field) for field in fields if field.knob.group == group]:
            parts += [f"## {group.capitalize()}\n", "| option | value | meaning |", "|---|---|---|"]
            parts += [*rows, ""]
    return "\n".join(parts)


def _row(field: Field) -> str:
    flags = ", ".join(f"`{flag}`" for flag in field.flags)
    return f"| {flags} | {_value(field)} | {_in_table(field.help)} |"


def _value(field: Field) -> str:
    """What an option takes: its unit as code, or its type in words."""
    if field.unit:
        return _in_table(f"`{field.unit}`")
    return {bool: "", int: "whole number", float: "number"}.get(field.type, "text")


def _in_table(text: str) -> str:
    return text.replace("|", "\\|")


def write_pages(app: Sphinx) -> None:
    """Beside the committed pages, with an ending that they do not have."""
    folder = app.srcdir / "reference"
    write_page(folder / "options.markdown", options(*TRAIN))
    write_page(folder / "errors.markdown", explain.page(catalog()))


def link_pages(_: Sphinx, name: str, content: list[str]) -> None:
    """Link the pages that a build writes, which a reader of the repository does not have."""
    if name == "reference/README":
        for title, page in (
            ("Python", "python/index.rst"),
            ("Commands", "commands/index.rst"),
            ("Options", "options.markdown"),
            ("Errors", "errors.markdown"),
        ):
            content[0] = content[0].replace(f"| {title} |", f"| [{title}]({page}) |")


def without_table_of_errors(app: Sphinx, _: object) -> None:
    """Leave the hundreds of codes out of every page's navigation: it is most of a build's time."""
    if app.env.docname == "reference/errors":
        app.env.metadata["reference/errors"]["tocdepth"] = 1


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("builder-inited", write_pages)
    app.connect("source-read", link_pages)
    app.connect("doctree-read", without_table_of_errors)
    return {"parallel_read_safe": True}
