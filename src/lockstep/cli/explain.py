"""`lockstep explain`: what an error's code stands for, its usual cause, and the fix."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated

import typer

from lockstep.config.knob import known
from lockstep.errors import catalog

_PAGE = """# Errors

Written by `lockstep explain > docs/guide/errors.md`.

An error ends with its code: `error: workers=0: ... [workers-below-one]`. `lockstep explain CODE` prints its entry.
"""


def explain(
    code: Annotated[
        str | None, typer.Argument(metavar="CODE", help="The word in brackets after an error.")
    ] = None,
) -> None:
    """Explain an error by its CODE. Without CODE: all of them, as Markdown."""
    entries = catalog()
    if code is None:
        print(_PAGE)
        print("\n\n".join(_section(each, entries[each]) for each in sorted(entries)))
        return
    code = code.strip("[]")
    known(entries, [code], "explain")
    entry = entries[code]
    print(f"{code}\n\n  {_shown(entry['message'])}\n")
    print(f"Cause: {entry['cause']}\nFix: {entry['fix']}")


def _section(code: str, entry: Mapping[str, str]) -> str:
    return f"## {code}\n\n    {_shown(entry['message'])}\n\n{entry['cause']}\n\n**Fix.** {entry['fix']}"


def _shown(message: str) -> str:
    """The sentence, with <name> for what an error fills in."""
    return re.sub(r"{(\w+)[^{}]*}", r"<\1>", message)
