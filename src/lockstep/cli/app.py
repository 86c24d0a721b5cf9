"""The command's frame: one line a command, and one place where a user's mistake becomes a sentence and an exit code.

A command's module imports nothing heavy at its top; what it needs of torch it imports when it runs, so that help is instant.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated, NoReturn

import typer

import lockstep
from lockstep.cli import (
    audit,
    bench,
    checkpoints,
    doctor,
    evaluate,
    lint,
    look,
    plan,
    predict,
    refusals,
    report,
    run,
    slurm,
    train,
    tune,
    verify,
)
from lockstep.errors import ExitCode, LockstepError, UsageError

app = typer.Typer(
    help="Data-parallel training for PyTorch in which the number of workers is a deployment detail.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("run", context_settings=run.CONTEXT)(run.run)
app.command("train")(train.train)
app.command("tune")(tune.tune)
app.command("plan")(plan.plan)
app.command("evaluate")(evaluate.evaluate)
app.command("predict")(predict.predict)
app.command("report")(report.report)
app.command("verify")(verify.verify)
app.command("slurm")(slurm.slurm)
app.command("audit")(audit.audit)
app.command("lint")(lint.lint)
app.command("doctor")(doctor.doctor)
app.add_typer(look.app, name="show")
app.add_typer(bench.app, name="bench")
app.add_typer(checkpoints.app, name="checkpoints")


def _version(asked: bool) -> None:
    if asked:
        print(f"lockstep {lockstep.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and leave.")] = False,
) -> None:
    """Options of `lockstep` itself."""


def _open_closed_streams() -> None:
    """Where the caller has closed stdin, stdout or stderr: what is opened next would take its number, and be written to by whoever prints."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is not None:
            continue
        handle = os.open(os.devnull, os.O_RDWR)
        if handle != number:
            os.dup2(handle, number)
            os.close(handle)
        os.set_inheritable(number, True)  # by ranks
        setattr(sys, name, open(number, "w" if number else "r", closefd=False))  # noqa: SIM115 - as long as the process


def _refuse(sentence: str) -> NoReturn:
    print(f"error: {sentence}", file=sys.stderr)
    sys.exit(ExitCode.USAGE)


def main() -> None:
    """The entry point. A user's mistake is one sentence on stderr and exit code 2, what Lockstep finds wrong one and 1; never a traceback."""
    _open_closed_streams()
    try:
        sys.exit(app(prog_name="lockstep", standalone_mode=False))
    except UsageError as error:
        _refuse(refusals.as_typed(str(error), sys.argv[1:]))
    except refusals.REFUSED as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            error.show()
            sys.exit(ExitCode.USAGE)
        _refuse(refusals.of_parser(error, sys.argv[1:]))
    except LockstepError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(ExitCode.FAILED)
    except KeyboardInterrupt:
        sys.exit(130)
