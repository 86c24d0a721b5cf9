"""The `lockstep` command: a line of help for each subcommand, and one place that turns a user's
mistake into a sentence and an exit code.

The module of a subcommand is imported when the user gives it, so that help and every start import
little. A subcommand imports torch when it runs.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Annotated, Any, NoReturn, cast

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

import lockstep
from lockstep.cli import refusals
from lockstep.cli.options import GroupedCommand, spread
from lockstep.errors import ExitCode, LockstepError, UsageError
from lockstep.runtime.streams import plain

SECTIONS = {  # of the help; a command has the name of its function
    "Train": {
        "run": "Run a script or module on several ranks.",
        "train": "Train TASK data-parallel on several ranks.",
        "evaluate": "Evaluate a checkpoint of a run.",
        "predict": "Write the predictions of a checkpoint of a run.",
        "checkpoints": "List, verify, compare, and export checkpoints.",
    },
    "Check": {
        "lint": "Find mistakes that break data-parallel training.",
        "verify": "Check that the number of workers changes nothing.",
        "replay": "Compute a step of a run again, and show its parts.",
        "doctor": "Check versions, GPUs, memory, limits, and the network.",
    },
    "Measure": {
        "bench": "Measure collectives, scaling, training, and sampling.",
        "plan": "Predict the step time for any number of workers.",
        "report": "Show where the time of a run went, as an HTML page.",
    },
    "Cluster": {"slurm": "Write a Slurm batch script for TASK or a script."},
    "Learn": {
        "new": "Write a skeleton of a sampler, a trainer or a task.",
        "show": "Draw algorithms, sample orders, meshes, and pipelines.",
        "explain": "Explain an error by its code.",
    },
}
COMMANDS: dict[str, str] = {}
for _section in SECTIONS.values():
    COMMANDS |= _section
_TRY = {
    "lockstep train digits --workers 2": "train a small CNN",
    "lockstep verify digits --workers 1,2 --steps 20": "compare 1 and 2 workers",
    "lockstep show ring --workers 4": "print a ring all-reduce",
}
_WIDEST = 120  # columns of the help, on a terminal that is wide enough
_MODULES = {"predict": "evaluate"}  # commands that share a module; others have their own


class CommandGroup(TyperGroup):
    """A group of commands whose help shows the whole first sentence of each."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        rows = []
        for name, command in self.commands.items():
            rows.append((name, command.get_short_help_str(limit=1000)))
        with formatter.section("Commands"):
            formatter.write_dl(rows)


class _Commands(CommandGroup):
    """The commands of `lockstep`, each imported when the user gives it. Until then a command with
    only its name and its line of help takes its place.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        for name, line in COMMANDS.items():
            self.commands[name] = TyperCommand(name, help=line)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write a help that fits a screen."""
        self.format_usage(ctx, formatter)
        formatter.write_paragraph()
        formatter.write_text(_DESCRIPTION)
        self.format_commands(ctx, formatter)
        formatter.write_paragraph()
        options = [max(param.opts, key=len) for param in self.get_params(ctx)]
        formatter.write_text(f"Options: {', '.join(options)}.")
        formatter.write_text("`lockstep COMMAND --help` describes a command and its options.")

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write a row for each command; the first of a section begins with the section's name."""
        rows = []
        for title, commands in SECTIONS.items():
            for name, line in commands.items():
                rows.append((f"{title:<9}{name}", line))
                title = ""
        formatter.write_paragraph()
        formatter.write_dl(rows)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Print the greeting if there are no arguments: the parser's import takes a tenth of a
        second.
        """
        if not args and not ctx.resilient_parsing:
            print(_greeting(ctx))
            ctx.exit()
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command that `args` begins with, complete with its options."""
        if args and args[0] in COMMANDS:
            self.commands[args[0]] = _imported(args[0])
        return super().resolve_command(ctx, args)


def _imported(name: str) -> Any:
    """Import a command: its module has a group of commands named `app`, or a function with the
    command's name.
    """
    module = import_module(f"lockstep.cli.{_MODULES.get(name, name)}")
    alone = _frame(add_completion=False)
    alone.callback()(_options)
    if hasattr(module, "app"):
        alone.add_typer(module.app, name=name, cls=CommandGroup, help=COMMANDS[name])
    else:
        frame = getattr(module, "COMMAND", GroupedCommand)
        context = getattr(module, "CONTEXT", None)
        alone.command(name, cls=frame, context_settings=context)(spread(getattr(module, name)))
    return cast(Any, get_command(alone)).commands[name]


def _frame(**options: Any) -> typer.Typer:
    return typer.Typer(
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": _WIDEST},
        **options,
    )


_DESCRIPTION = "Train PyTorch models on any number of workers, with the same result."
app = _frame(cls=_Commands, help=_DESCRIPTION)


def _version(requested: bool) -> None:
    if requested:
        print(f"lockstep {lockstep.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Options of `lockstep` itself."""


def _greeting(ctx: Any) -> str:
    """Return the description of `lockstep`, three commands to try, and all commands."""
    formatter = ctx.make_formatter()
    formatter.write_text(_DESCRIPTION)
    with formatter.section("Try"):
        formatter.write_dl([*_TRY.items()], col_max=50)
    ctx.command.format_commands(ctx, formatter)
    formatter.write_paragraph()
    formatter.write_text("`lockstep COMMAND --help` describes a command and its options.")
    formatter.write_text("`lockstep --install-completion` lets the Tab key complete them.")
    return str(formatter.getvalue()).rstrip()


def _refuse(sentence: str) -> NoReturn:
    print(plain(f"error: {sentence}"), file=sys.stderr)
    sys.exit(ExitCode.USAGE)


def main() -> None:
    """Run the command. A user's mistake becomes one sentence on stderr and exit code 2; any other
    LockstepError one sentence and exit code 1. Neither prints a traceback.
    """
    try:
        sys.exit(app(prog_name="lockstep", standalone_mode=False))
    except UsageError as error:
        _refuse(refusals.as_typed(error, sys.argv[1:]))
    except refusals.REFUSED as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            error.show()
            sys.exit(ExitCode.USAGE)
        _refuse(str(refusals.of_parser(error, sys.argv[1:])))
    except LockstepError as error:
        print(plain(f"error: {error}"), file=sys.stderr)
        sys.exit(ExitCode.FAILED)
