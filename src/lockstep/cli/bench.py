"""`lockstep bench`: measurements, as a table and as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from lockstep.errors import UsageError

app = typer.Typer(help="Measure on this machine.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Keeps `sampler` a command of its own while it is the only one."""


@app.command("sampler")
def sampler(
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the figures to this file, as JSON, too.")] = None,
    largest_torch: Annotated[
        int, typer.Option(metavar="N", help="Samples up to which torch's DistributedSampler is measured, at 64 bytes of memory each.")
    ] = 10**8,
) -> None:
    """Start-up time, memory and time per index of a shuffled order beside torch's DistributedSampler, each in a fresh process."""
    from lockstep.measure import sampler as measured

    found = list(measured.rows(largest_torch))
    print(measured.table(found))
    if json_file is not None:
        try:
            json_file.write_text(json.dumps({"rows": [row.as_json() for row in found]}, indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise UsageError(f"--json {json_file} cannot be written: {error.strerror or error}") from error
