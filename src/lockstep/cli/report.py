"""`lockstep report`: what to do first to make a run faster, and why, on one page."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from lockstep.cli.arguments import JsonFile, existing_run
from lockstep.cli.completion import runs
from lockstep.config.knob import knobs
from lockstep.config.settings import Settings
from lockstep.runtime.streams import plain
from lockstep.training.resolve import BUNDLED

_INSIDE = ("grow", "grow_if_wanted")
"""Settings that the launcher passes to the ranks; no option sets them."""


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
    """Show what to do first to make RUN faster, and write an HTML page with its spikes and times.

    The page is one file and needs no server. RUN/timeline.json is a trace for Perfetto.
    """
    from lockstep.runs import read
    from lockstep.tools.report.page import FILE, as_json, page, sentences
    from lockstep.tools.report.verdict import verdict
    from lockstep.tools.timing.output_files import check_writable, write_json, writing
    from lockstep.training import perfetto

    recorded = read(existing_run(run))
    file = out or recorded.path / FILE
    check_writable(file, "--out")
    check_writable(json_file, "--json")
    timeline = recorded.timeline
    judged = None if timeline is None else verdict(timeline, recorded.settings)
    print(plain("\n".join(sentences(recorded, judged))))
    write_json(json_file, as_json(recorded, judged))
    text = page(recorded, judged, command_of(recorded.settings))
    with writing(file, "--out"):
        file.write_text(text, encoding="utf-8")
    print(f"page: {file}")
    if timeline is not None:
        try:
            print(f"timeline: {perfetto.write(recorded.path, timeline)}")
        except OSError as error:
            trace = recorded.path / perfetto.FILE
            print(
                f"warning: {trace} cannot be written ({error.strerror}) and is left out",
                file=sys.stderr,
            )


def command_of(settings: Settings) -> str:
    """Return a command that trains the same, with the options that differ from the defaults. It is
    empty for a task that was made in Python and that the command line does not know.
    """
    if settings.task not in BUNDLED and not settings.task.endswith(".py"):
        return ""
    words = ["lockstep", "train", settings.task]
    for name, knob in knobs(Settings).items():
        value = getattr(settings, name)
        if (value == knob.default and name != "workers") or name in _INSIDE:
            continue  # the default number of workers depends on the host
        flag = knob.flags[0]
        if isinstance(value, bool):
            words.append(flag if value else flag.replace("--", "--no-", 1))
            continue
        for single in value if knob.is_repeated else [value]:
            words += [flag, str(single)]
    for key, value in settings.overrides.items():
        words += ["--set", f"{key}={value}"]
    return shlex.join(words)
