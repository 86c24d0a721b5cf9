"""`lockstep lint`: mistakes of data-parallel scripts, found without running them."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lockstep.cli.arguments import JsonFile
from lockstep.data.windows import counted
from lockstep.errors import ExitCode, UsageError
from lockstep.tools.timing.output_files import write_json, writing

if TYPE_CHECKING:
    from lockstep.tools.lint import LintFinding


def lint(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Python files to check.")],
    fix: Annotated[
        bool, typer.Option("--fix", help="Apply the safe repairs to the files.")
    ] = False,
    json_file: JsonFile = None,
) -> None:
    """Find mistakes in Python files that break data-parallel training.

    Such mistakes make replicas drift apart, or make ranks wait forever. The exit code is 1 if it
    finds one, and 2 if a file cannot be read.
    """
    findings: list[LintFinding] = []
    unreadable: list[str] = []
    for file in files:
        try:
            findings += _checked(file, fix=fix)
        except UsageError as error:
            unreadable.append(str(error))
    for finding in findings:
        print(finding)
    write_json(json_file, {"findings": list(map(asdict, findings)), "unreadable": unreadable})
    for error_text in unreadable:
        print(f"error: {error_text}", file=sys.stderr)
    if unreadable:
        raise typer.Exit(ExitCode.USAGE)
    if findings:
        raise typer.Exit(ExitCode.FAILED)
    print(f"no mistakes found in {counted(len(files), 'file')}")


def _checked(file: Path, fix: bool) -> list[LintFinding]:
    """Return the findings in a file. With `fix`, write the safe fixes into it first, and return
    what is left.
    """
    from lockstep.tools.lint import check_file

    result = check_file(file)
    if not fix or result.fixed is None:
        return result.findings
    with writing(file, "--fix"):
        file.write_bytes(result.fixed)
    remaining = check_file(file).findings
    print(f"{file}: {len(result.findings) - len(remaining)} fixed")
    return remaining
