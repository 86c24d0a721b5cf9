"""`lockstep lint`: mistakes of data-parallel scripts, found without running them."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from lockstep.errors import ExitCode, UsageError


def lint(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Python files.")],
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the findings to this file, as JSON, too.")] = None,
) -> None:
    """Look for mistakes that make replicas drift apart or ranks wait for ever. Exit code 1 if there is one, 2 for an unreadable file."""
    from lockstep.lint import Finding, check_file

    findings: list[Finding] = []
    unreadable: list[UsageError] = []
    for file in files:
        try:
            findings += check_file(file)
        except UsageError as error:
            unreadable.append(error)
    for finding in findings:
        print(finding)
    if json_file is not None:
        _write(json_file, {"findings": [asdict(finding) for finding in findings], "unreadable": [str(each) for each in unreadable]})
    for refused in unreadable:
        print(f"error: {refused}", file=sys.stderr)
    if unreadable:
        raise typer.Exit(ExitCode.USAGE)
    if findings:
        raise typer.Exit(ExitCode.FAILED)
    print(f"no mistakes found in {len(files)} file{'s' * (len(files) != 1)}")


def _write(file: Path, content: object) -> None:
    try:
        file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--json {file} cannot be written: {error.strerror or error}") from error
