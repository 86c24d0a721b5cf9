"""A command given in this process, as Python would call it: `command("train", "digits",
reduce="ring")`. Its errors are raised.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, get_type_hints

import typer

from lockstep.cli import app
from lockstep.cli.options import GroupedCommand, spread


def command(name: str, *words: str, **options: Any) -> None:
    """`set=["a=1", "b=2"]` is given twice; True is a flag. Raises what the command raises;
    SystemExit where it leaves with another code than 0.
    """
    line = [name]
    for option, value in options.items():
        for each in value if isinstance(value, list) else [value]:
            line += [f"--{option.replace('_', '-')}", *([] if each is True else [str(each)])]
    code = app.app([*line, *words], prog_name="lockstep", standalone_mode=False)
    if code:
        raise SystemExit(code)


def taken(function: Callable[..., None], *line: str) -> dict[str, Any]:
    """What a function that is declared as a command is given for a command line."""
    found: dict[str, Any] = {}

    def note(**values: Any) -> None:
        found.update(values)

    note.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
    note.__annotations__ = get_type_hints(function, include_extras=True)
    alone = typer.Typer(add_completion=False)
    alone.command("alone", cls=GroupedCommand)(spread(note))
    alone(list(line), standalone_mode=False)
    return found
