"""The command's frame: one line a command, and one place where a user's mistake becomes a sentence
and an exit code.

The module of a command is imported when that command is given, so that help, and every start,
imports little. What a command needs of torch it imports when it runs.
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

COMMANDS = {  # name, which is its function's too: what it does
    "run": "Run a script or module on several ranks.",
    "train": "Train TASK data-parallel on several ranks.",
    "tune": "Find the settings that train TASK fastest here.",
    "plan": "Predict the step time of TASK at any number of workers.",
    "evaluate": "Evaluate a checkpoint of a run.",
    "predict": "Write the predictions of a checkpoint of a run.",
    "report": "Show where the time of a run went, as an HTML page.",
    "verify": "Check that the number of workers does not change training.",
    "slurm": "Write a Slurm batch script for TASK or a script.",
    "audit": "Check how the samples of TASK reach the ranks.",
    "lint": "Find mistakes in a file that break data-parallel training.",
    "explain": "Explain an error by its code.",
    "doctor": "Check versions, GPUs, memory, limits, and network links.",
    "show": "Draw algorithms, sample orders, meshes, and pipelines.",
    "bench": "Measure collectives, scaling, training, and sampling.",
    "checkpoints": "List, verify, compare, and export checkpoints.",
}
_MODULES = {"predict": "evaluate"}  # of commands that share one; others have their own


class _Commands(TyperGroup):
    """The commands of `lockstep`, each imported when it is given. Until then its name and its
    line of help stand for it.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        for name, line in COMMANDS.items():
            self.commands[name] = TyperCommand(name, help=line)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that `args` begins with, complete with its options."""
        if args and args[0] in COMMANDS:
            self.commands[args[0]] = _imported(args[0])
        return super().resolve_command(ctx, args)


def _imported(name: str) -> Any:
    """The command that its module declares: a group of commands named `app`, or a function of
    its own name.
    """
    module = import_module(f"lockstep.cli.{_MODULES.get(name, name)}")
    alone = _frame()
    alone.callback()(_options)
    if hasattr(module, "app"):
        alone.add_typer(module.app, name=name)
    else:
        frame = getattr(module, "COMMAND", GroupedCommand)
        context = getattr(module, "CONTEXT", None)
        alone.command(name, cls=frame, context_settings=context)(spread(getattr(module, name)))
    return cast(Any, get_command(alone)).commands[name]


def _frame(**options: Any) -> typer.Typer:
    return typer.Typer(
        add_completion=False,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
        **options,
    )


app = _frame(
    cls=_Commands,
    help=(
        "Data-parallel training for PyTorch in which the number of workers is a deployment detail."
    ),
)


def _version(asked: bool) -> None:
    if asked:
        print(f"lockstep {lockstep.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_version, is_eager=True, help="Print the version and leave."
        ),
    ] = False,
) -> None:
    """Options of `lockstep` itself."""


def _refuse(sentence: str) -> NoReturn:
    print(f"error: {sentence}", file=sys.stderr)
    sys.exit(ExitCode.USAGE)


def main() -> None:
    """The entry point. A user's mistake is one sentence on stderr and exit code 2, what Lockstep
    finds wrong one and 1; never a traceback.
    """
    try:
        sys.exit(app(prog_name="lockstep", standalone_mode=False))
    except UsageError as error:
        _refuse(refusals.as_typed(str(error), sys.argv[1:]))
    except refusals.REFUSED as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            error.show()
            sys.exit(ExitCode.USAGE)
        _refuse(str(refusals.of_parser(error, sys.argv[1:])))
    except LockstepError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(ExitCode.FAILED)
