"""What a training says of itself in its journal: how it trains, who holds what, where it goes on
from.
"""

from __future__ import annotations

import json
import socket
from typing import Any

from lockstep.checkpoints.files import Checkpoint
from lockstep.collectives.texts import everybodys
from lockstep.gradients.layout import BUCKET
from lockstep.training.assembled import AssembledTraining
from lockstep.training.journal import Journal
from lockstep.training.resume import moved

MESH = "mesh.json"


def say_start(training: AssembledTraining, journal: Journal) -> None:
    """Every rank calls it."""
    settings, world, method = training.settings, training.world, training.stepper.method
    came_from = {} if settings.settings_file is None else {"settings_file": settings.settings_file}
    line = f"{training.loader.describe(training.placed.holder)}; {_how(training)}"
    journal.event(
        "start",
        line,
        workers=world.size,
        steps=training.length.steps,
        epochs=training.length.epochs,
        **came_from,
    )
    if settings.mesh is not None:
        _say_mesh(training, journal)
    if not method.world_size_free:
        journal.event(
            "method",
            "the number of workers is part of what is trained: another one gives other weights",
        )
    if settings.exact:
        journal.event(
            "exact",
            "exact: sums along one tree over the micro-batches of a step;"
            f" {world.compute_deterministically()}",
        )


def _how(training: AssembledTraining) -> str:
    settings, method = training.settings, training.stepper.method
    buckets = (
        "" if settings.bucket_mb == BUCKET / 2**20 else f" in buckets of {settings.bucket_mb:g} MiB"
    )
    what = "meetings" if method.local is not None else "gradients"
    replicas = training.placed.replicas(training.world.group).size
    silent = method.server is not None or (replicas == 1 and method.compress is None)
    reduction = "" if silent else f"{what} by {training.stepper.reducer.reduction.name}{buckets}, "
    threads = [] if settings.threads is None else [_a_rank(settings.threads, "thread")]
    workers = [_a_rank(settings.loader_workers, "loader worker")] if settings.loader_workers else []
    return ", ".join(
        [f"{reduction}{method.describe()}{'' if method.alone else ' update'}", *threads, *workers]
    )


def _a_rank(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count > 1)} a rank"


def mesh_in_words(training: AssembledTraining) -> str:
    """For the last line."""
    grid = training.settings.mesh
    if grid is None:
        return ""
    return f"mesh {grid}{f' {training.settings.schedule}' if grid.pipeline > 1 else ''}"


def _say_mesh(training: AssembledTraining, journal: Journal) -> None:
    """Who holds what: a line, and mesh.json in the run directory."""
    settings, world, grid = training.settings, training.world, training.settings.mesh
    assert grid is not None
    everyone: list[dict[str, Any]] = everybodys(
        {"host": socket.gethostname(), **training.placed.describe()}, world.control, "for mesh.json"
    )
    if world.rank == 0 and training.saves.path is not None:
        said = {
            "mesh": str(grid),
            "schedule": settings.schedule if grid.pipeline > 1 else None,
            "ranks": everyone,
        }
        (training.saves.path / MESH).write_text(json.dumps(said, indent=1) + "\n", encoding="utf-8")
    held = [each["parameters"] for each in everyone if "parameters" in each]
    whole = "every rank holds the whole model"
    if held:
        least, most = min(held), max(held)
        whole = (
            f"a rank holds {least:,}{'' if least == most else f' to {most:,}'} of"
            f" {everyone[0]['of']:,} parameters"
        )
    journal.event("mesh", f"mesh {grid}: {whole}")


def say_resumed(
    training: AssembledTraining, journal: Journal, found: Checkpoint, changed: str
) -> None:
    """From `found`, since which the task has `changed`."""
    of = training.length.of_steps
    journal.event(
        "resumed",
        f"resumed from step {found.step}{of}",
        step=found.step,
        workers=training.world.size,
    )
    if changed:
        line = f"warning: the task has changed since step {found.step} was saved: {changed}"
        journal.event("changed", line, step=found.step, changes=changed)
    if training.settings.exact and (
        difference := moved(found.state["machine"], training.identity.machine)
    ):
        journal.event(
            "moved",
            f"the bits may differ from those of a run that stayed where it was: {difference}",
            step=found.step,
        )
