"""`lockstep explain`: the meaning of an error's code, its usual cause, and the fix."""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Mapping
from string import Formatter
from typing import Annotated

import typer

from lockstep.cli.completion import codes
from lockstep.cli.refusals import meant
from lockstep.errors import UsageError, catalog

_WIDEST = 88  # columns
_HEAD = """# Errors

An error ends with its code: `error: --epochs 0: ... [wrong-value]`. `lockstep explain CODE` prints its entry."""


def explain(
    code: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="CODE",
            autocompletion=codes,
            help="Code of an error: the word in brackets at its end.",
        ),
    ] = None,
) -> None:
    """Explain an error by its code.

    CODE may also be the whole line of the error, in quotes. Without CODE, it prints all entries as
    Markdown.
    """
    entries = catalog()
    if not code:
        print(page(entries))
        return
    name = _code(" ".join(code))
    if name not in entries:
        raise UsageError("unknown-code", value=name, near=meant(name, entries.keys()))
    print(_text(name, entries[name], min(_WIDEST, shutil.get_terminal_size().columns)))


def _code(line: str) -> str:
    """Find the code in text copied from a terminal: in brackets, after `error:`, or alone."""
    bracketed = re.search(r"\[\s*([\w-]+)\s*\]?\s*$", line, re.MULTILINE)
    name = bracketed[1] if bracketed else line.removeprefix("error:").strip("[] `'\".")
    return name.lower()


def _text(code: str, entry: Mapping[str, str], width: int) -> str:
    def wrapped(label: str, text: str) -> str:
        indent = " " * len(label)
        return textwrap.fill(
            text, width, initial_indent=label, subsequent_indent=indent, break_on_hyphens=False
        )

    message = wrapped("    ", _shown(entry["message"]))
    cause = wrapped("Cause: ", entry["cause"])
    fix = wrapped("Fix:   ", entry["fix"])
    return "\n\n".join([code, message, cause, fix])


def page(entries: Mapping[str, Mapping[str, str]]) -> str:
    """Return all entries as Markdown."""
    sections = [_section(code, entries[code]) for code in sorted(entries)]
    return "\n\n".join([_HEAD, *sections])


def _section(code: str, entry: Mapping[str, str]) -> str:
    return f"## {code}\n\n    {_shown(entry['message'])}\n\n{entry['cause']}\n\n**Fix.** {entry['fix']}"


def _shown(message: str) -> str:
    """Return the sentence with <name> for each placeholder: `{count:# rank}` is `<count> ranks`."""
    shown = ""
    for text, name, spec, _ in Formatter().parse(message):
        shown += text
        if name:
            shown += f"<{name}>"
            if spec and spec.startswith("#"):
                shown += f" {spec.lstrip('# ')}s"
    return shown
