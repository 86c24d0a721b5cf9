"""`lockstep audit`: check how a training would use a task's data, without training."""

from __future__ import annotations

from typing import Annotated

import typer

from lockstep.cli.arguments import JsonFile, TaskName, at_least_one, task_of
from lockstep.cli.options import Only
from lockstep.config.launching import RunChoice
from lockstep.errors import ExitCode
from lockstep.tools.timing.output_files import write_json


def audit(
    task: TaskName,
    choice: Annotated[RunChoice, Only("overrides")],
    workers: Annotated[
        int,
        typer.Option(
            "--workers", "-n", metavar="N", help="Number of ranks to audit for. None is started."
        ),
    ] = 8,
    epochs: Annotated[
        int, typer.Option(metavar="N", help="Number of epochs to check for coverage.")
    ] = 2,
    json: JsonFile = None,
) -> None:
    """Check how the training samples of TASK reach the ranks.

    It checks coverage, duplicates, balance, padding and augmentation. It runs in one process and
    does not train. The exit code is 1 if it finds a problem.
    """
    at_least_one(workers=workers, epochs=epochs)
    place, overrides = task_of(task, choice.overrides)
    from lockstep.tools.audit import audit as look  # imports torch
    from lockstep.training.resolve import resolve

    found = resolve(place, overrides)
    report = look(
        found.train_data,
        global_batch=found.global_batch,
        micro_batch=found.micro_batch,
        workers=workers,
        epochs=epochs,
        seed=found.seed,
        collate=found.collate,
        order=found.order(found.train_data) if found.order is not None else None,
    )
    write_json(json, {"task": found.name, **report.as_json()})
    print(
        f"{found.name}: {report.samples} samples, {epochs} epoch{'s' * (epochs != 1)}, {workers}"
        f" worker{'s' * (workers != 1)}"
    )
    print(report.table())
    if report.wrong:
        raise typer.Exit(ExitCode.FAILED)
