"""`lockstep report`: what to do first to make a run faster, and why, on one page."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from lockstep.cli.arguments import JsonFile, existing_run
from lockstep.cli.completion import runs
from lockstep.runtime.streams import plain


def report(
    run: Annotated[
        Path,
        typer.Argument(
            metavar="RUN",
            autocompletion=runs,
            help=(
                "Run directory of `lockstep train`, also of a run that still trains. latest is the"
                " newest under runs/."
            ),
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", metavar="FILE", help="Write the page to FILE. Default: RUN/report.html."
        ),
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Show what to do first to make RUN faster, where its time went, and write an HTML page.

    The page is one file and needs no server. RUN/timeline.json is a trace for Perfetto.
    """
    from lockstep.tools.recorded import read
    from lockstep.tools.report.page import FILE, as_json, page, told
    from lockstep.tools.report.verdict import verdict
    from lockstep.tools.timing.output_files import check_writable, write_json, writing
    from lockstep.training import perfetto

    run = existing_run(run)
    recorded = read(run)
    file = out or run / FILE
    check_writable(file, "--out")
    check_writable(json_file, "--json")
    judged = None if recorded.anatomy is None else verdict(recorded.anatomy, recorded.settings)
    print(plain("\n".join(told(recorded, judged))))
    write_json(json_file, as_json(recorded, judged))
    text = page(recorded, judged)
    with writing(file, "--out"):
        file.write_text(text, encoding="utf-8")
    print(f"page: {file}")
    if recorded.anatomy is not None:
        try:
            print(f"timeline: {perfetto.write(run, recorded.anatomy)}")
        except OSError as error:
            print(
                f"warning: {run / perfetto.FILE} cannot be written ({error.strerror}) and is left out",
                file=sys.stderr,
            )
