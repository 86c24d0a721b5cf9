"""`lockstep tune`: find the settings that run a task fastest on this machine, and show them as a
table, a file, and a command.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

import lockstep
from lockstep.cli.arguments import TaskName, Workers, answer_of, fitted_to, task_of
from lockstep.cli.options import Only
from lockstep.config.knob import knobs, number
from lockstep.config.launching import RunChoice
from lockstep.config.settings import Config, Settings
from lockstep.runtime.cores import warn_if_busy

if TYPE_CHECKING:
    from lockstep.tools.tune.micro_batch import Size
    from lockstep.tools.tune.search import Found

_FOR_SEARCH = 0.7  # fraction of the time; the rest is for the advice on micro_batch


def tune(
    task: TaskName,
    config: Annotated[Config, Only("device")],
    choice: Annotated[RunChoice, Only("overrides")],
    workers: Workers = None,
    seconds: Annotated[
        float,
        typer.Option(
            metavar="SECONDS", help="Seconds to measure, in addition to starting the ranks."
        ),
    ] = 60,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write the fastest settings to FILE, for `lockstep train --settings FILE`.",
        ),
    ] = None,
) -> None:
    """Find the settings that train TASK fastest on this machine.

    It tries reduce, update, threads, loader workers and bucket size, one at a time. Each candidate
    alternates with the best settings so far, on the same ranks. At the end the winner must beat the
    default. It also measures micro_batch, and gives advice. It changes nothing: the last line is the
    command to use.
    """
    from lockstep.tools.timing.output_files import check_writable

    number("seconds", seconds, above=0)
    if out is not None:
        check_writable(out, "--out")
    place, overrides = task_of(task, choice.overrides)
    settings = fitted_to(workers, task=place, overrides=overrides, device=config.device)
    warn_if_busy()
    answer = _search(task, settings, _FOR_SEARCH * seconds)
    from lockstep.tools.tune.search import Found  # imports torch, only after a successful start
    from lockstep.tools.tune.table import table
    from lockstep.training.metrics import typed

    found: Found = typed(Found, answer["found"])
    here = answer["here"]
    settings = replace(settings, device=here["device"])
    sizes = _sizes(
        replace(settings, **found.changes), answer, max(0.0, seconds - answer["seconds"])
    )
    print(
        f"{answer['name']}: {settings.workers} worker{'s' * (settings.workers != 1)} on"
        f" {_machine(here)}, torch {here['torch']}\n"
    )
    print(f"{table(found)}\n\n{_advice(sizes, answer)}\n")
    if out is not None:
        _write(out, answer, settings, seconds, found)
    print(_command(task, settings, config.device, found, out))


def _search(task: str, settings: Settings, seconds: float) -> dict[str, Any]:
    """Search on ranks of this host, and return rank 0's answer."""
    from lockstep.launcher.rank import Target
    from lockstep.launcher.supervise import supervise

    with TemporaryDirectory(prefix="lockstep-") as scratch:
        settings.write(Path(scratch))
        target = Target(
            module="lockstep.tools.tune.tune_rank", args=[scratch, str(seconds)], task=settings.task
        )
        outcome = supervise(target, settings.workers, console="first")
        return answer_of(outcome, Path(scratch) / "answer.json", task)


def _sizes(settings: Settings, answer: Mapping[str, Any], seconds: float) -> list[Size]:
    from lockstep.tools.tune.micro_batch import advise

    found = []
    for size in advise(settings, answer["global_batch"], answer["micro_batch"], seconds):
        print(
            f"micro_batch={size.micro_batch}:"
            f" {size.note or f'{size.samples_per_s:,.0f} samples/s'}",
            file=sys.stderr,
            flush=True,
        )
        found.append(size)
    return found


def _advice(sizes: list[Size], answer: Mapping[str, Any]) -> str:
    from lockstep.tools.tune.table import advice

    return advice(sizes, answer["micro_batch"], answer["global_batch"])


def _machine(here: Mapping[str, Any]) -> str:
    cores = f"{here['cores']} core{'s' * (here['cores'] != 1)}"
    kind = "the CPU" if here["device"] == "cpu" else "GPUs"
    return (
        f"{kind} ({here['cpu']}, {cores}, {here['threads']} intra-op"
        f" thread{'s' * (here['threads'] != 1)} a rank)"
    )


def _write(
    out: Path, answer: Mapping[str, Any], settings: Settings, seconds: float, found: Found
) -> None:
    from lockstep.training.resolve import short_name
    from lockstep.training.tuned import Tuned, TunedOn

    measured = TunedOn(
        task=short_name(settings.task),
        overrides=dict(settings.overrides),
        workers=settings.workers,
        seconds=seconds,
        lockstep=lockstep.__version__,
        ratio=found.final.ratio if found.changes and found.final else 1.0,
        **answer["here"],
    )
    Tuned(settings=found.changes, measured=measured).write(out)


def _command(task: str, settings: Settings, device: str, found: Found, out: Path | None) -> str:
    """Return the command that trains with the winner."""
    from lockstep.tools.tune.table import spelled

    words = ["lockstep", "train", task, "--workers", str(settings.workers)]
    words += ["--device", device] if device != "auto" else []
    for name, value in settings.overrides.items():
        words += ["--set", f"{name}={value}"]
    if out is not None:
        return shlex.join([*words, "--settings", str(out)])
    for name, value in found.changes.items():
        words += [knobs(Config)[name].flags[0], spelled(value)]
    return shlex.join(words)
