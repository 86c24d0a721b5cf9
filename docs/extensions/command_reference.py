"""The reference of commands: a page for each, with every argument and option, as `--help-all`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from generated import escaped, title, write
from sphinx.application import Sphinx
from typer.main import get_command

from lockstep.cli.app import COMMANDS, app
from lockstep.cli.options import help_row, help_section
from lockstep.config.knob import GROUPS


def commands() -> Iterator[tuple[str, Any]]:
    """Every command by its full name, a group before the commands in it."""
    frame: Any = get_command(app)
    for name in COMMANDS:
        _, found, _ = frame.resolve_command(_context(frame, "lockstep"), [name])
        yield f"lockstep {name}", found
        for below, each in getattr(found, "commands", {}).items():
            yield f"lockstep {name} {below}", each


def _context(command: Any, name: str) -> Any:
    return command.make_context(name, [], resilient_parsing=True)


def shown_parameters(command: Any) -> list[Any]:
    """Arguments and options that help shows, -h aside."""
    return [
        each
        for each in command.params
        if not getattr(each, "hidden", False) and each.name not in ("help", "help_all")
    ]


def described(name: str, command: Any) -> str:
    """Usage, help, and the parameters in their groups."""
    context = _context(command, name)
    usage = " ".join(command.collect_usage_pieces(context))
    parts = [f".. code-block:: text\n\n   {name} {usage}\n", _paragraphs(command.help or "")]
    groups: dict[str, list[str]] = {}
    for each in shown_parameters(command):
        heading = help_section(each, grouped=True)
        groups.setdefault(heading, []).append(_parameter(each, context))
    order = ["Arguments", *(f"Options: {group}" for group in GROUPS), "Options"]
    parts.append(f".. program:: {name}\n")
    for group in sorted(groups, key=order.index):
        parts += [f".. rubric:: {group}\n", *groups[group]]
    return "\n".join(parts)


def _paragraphs(text: str) -> str:
    return "\n\n".join(map(_paragraph, text.split("\n\n"))) + "\n"


def _paragraph(text: str) -> str:
    """Lines as they are, under their heading, where the help says so (click's \\b)."""
    if not text.startswith("\b"):
        return escaped(" ".join(text.split()))
    heading, *lines = text.removeprefix("\b").strip().splitlines()
    return "\n".join(
        [escaped(heading), "", ".. code-block:: text", "", *(f"   {line}" for line in lines)]
    )


def _parameter(parameter: Any, context: Any) -> str:
    """An entry with an anchor of its own."""
    left, told = help_row(parameter, *parameter.get_help_record(context))
    if parameter.param_type_name == "argument":
        return f"``{left}``\n   {escaped(told)}\n"
    return f".. option:: {left.replace(' / ', ', ')}\n\n   {escaped(told)}\n"


def pages() -> Iterator[tuple[str, str]]:
    """File and text of every page."""
    every = dict(commands())
    for name in COMMANDS:
        full = f"lockstep {name}"
        parts = [title(full), described(full, every[full])]
        for below, command in every.items():
            if below.startswith(f"{full} "):
                parts += [title(below, "-"), described(below, command)]
        yield f"{name}.rst", "\n".join(parts)
    rows = [f":doc:`lockstep {name} <{name}>`\n   {escaped(COMMANDS[name])}\n" for name in COMMANDS]
    toctree = "\n".join(f"   {name}" for name in COMMANDS)
    yield (
        "index.rst",
        "\n".join(
            [
                title("Commands"),
                "Every command with all of its options, from the program itself.\n",
                *rows,
                f".. toctree::\n   :hidden:\n\n{toctree}\n",
            ]
        ),
    )


def setup(app: Sphinx) -> dict[str, bool]:
    folder = app.srcdir / "reference" / "commands"
    app.connect("builder-inited", lambda _: write(folder, dict(pages())))
    return {"parallel_read_safe": True}
