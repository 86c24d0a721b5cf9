"""`lockstep doctor`: is this host, or are these hosts, fit to train?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lockstep.cli.given import at_least_one
from lockstep.errors import ExitCode, UsageError

_WORKERS, _PORT, _WAIT = 2, 29550, 10.0


def doctor(
    hosts: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="HOSTS", show_default=False, help="Names or addresses; run the same command on each. Default: this host alone."
        ),
    ] = None,
    workers: Annotated[
        int | None, typer.Option("--workers", "-n", show_default=False, help=f"Ranks to start on this host alone; default: {_WORKERS}.")
    ] = None,
    port: Annotated[int | None, typer.Option(show_default=False, help=f"Of the first of HOSTS, where they meet; default: {_PORT}.")] = None,
    wait: Annotated[
        float | None, typer.Option(metavar="SECONDS", show_default=False, help=f"For the other HOSTS to begin; default: {_WAIT:g}.")
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", show_default=False, help="Write what was found to this file, too.")
    ] = None,
) -> None:
    """Check what training needs: versions, GPUs, cores, memory, limits, names, ports, right sums, and the speed of every link.

    With HOSTS, run it on all of them within ten seconds: they find each other, and a slow or closed way between two is named.
    Ends with "fit to train" and exit code 0, or with what to fix and exit code 1. Warnings do not count.
    """
    _refuse({"--port": port, "--wait": wait} if not hosts else {"--workers": workers}, hosts)
    at_least_one(workers=workers)
    from lockstep.measure.files import check_writable, write_json

    check_writable(json_file, "--json")
    from lockstep.doctor import hosts as several
    from lockstep.doctor import one_host, report

    if hosts:
        found = several.examine(hosts, _PORT if port is None else port, _WAIT if wait is None else wait)
    else:
        found = one_host.examine(_WORKERS if workers is None else workers)
    print(report.text(found))
    write_json(json_file, report.as_json(found))
    if not found.fit:
        raise typer.Exit(ExitCode.FAILED)


def _refuse(given: dict[str, object], hosts: list[str] | None) -> None:
    for option, value in given.items():
        if value is not None:
            why = "is for several hosts: name them" if not hosts else "is for one host: with HOSTS each starts one process"
            raise UsageError(f"{option} {value} {why}, or leave {option} out")
