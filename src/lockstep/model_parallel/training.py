"""What a training does with a mesh, beyond walking its windows: it makes the part, says who holds what, and in the end what the weights are."""

from __future__ import annotations

import json
import socket
from typing import TYPE_CHECKING, Any

from lockstep.collectives.texts import everybodys
from lockstep.data.loader import is_iterable
from lockstep.errors import UsageError
from lockstep.settings import Settings, check_parts
from lockstep.task import Task
from lockstep.training.forward import Forward
from lockstep.training.journal import Journal
from lockstep.training.run_directory import RunDirectory
from lockstep.world import World

if TYPE_CHECKING:
    from lockstep.model_parallel.part import Part

FILE = "mesh.json"


def part_of(task: Task, forward: Forward, settings: Settings, world: World) -> Part | None:
    """This rank's part of `forward.model`, which is taken apart; None where every rank holds all of it."""
    grid = settings.grid
    if grid is None or grid.only_data:
        return None
    check_parts(grid, settings.precision or task.precision, compile=task.compile if settings.compile is None else settings.compile)
    if is_iterable(task.train_data) and grid.replicas not in (1, world.size):
        raise UsageError(
            f"mesh={settings.mesh!r}: an iterable data set deals itself out to all ranks or to one, and here there are {grid.replicas} shares for "
            f"{world.size} ranks: give it numbers (__len__ and __getitem__), or choose data and shard alone, or none of them"
        )
    from lockstep.model_parallel.part import Part  # with torch's engines, which take a second to import

    return Part(task, forward.model, grid, world, schedule=settings.schedule, split=settings.split, forward=forward)


def mesh_in_words(settings: Settings) -> str:
    """For the last line."""
    grid = settings.grid
    if grid is None:
        return ""
    return f"mesh {grid}{f' {settings.schedule}' if grid.pipeline > 1 else ''}"


def say_mesh(settings: Settings, part: Part | None, world: World, directory: RunDirectory | None, journal: Journal) -> None:
    """Who holds what: a line, and mesh.json in the run directory. Every rank calls it."""
    grid = settings.grid
    assert grid is not None
    mine: dict[str, Any] = {"rank": world.rank, "data": world.rank, "layers": "all"} if part is None else part.describe()
    everyone = everybodys({"host": socket.gethostname(), **mine}, world.control, "for mesh.json")
    if world.rank == 0 and directory is not None:
        file = directory.path / FILE
        said = {"mesh": str(grid), "schedule": settings.schedule if grid.pipeline > 1 else None, "ranks": everyone}
        file.write_text(json.dumps(said, indent=1) + "\n", encoding="utf-8")
    held = [each["parameters"] for each in everyone if "parameters" in each]
    whole = "every rank holds the whole model"
    if held:
        least, most = min(held), max(held)
        whole = f"a rank holds {least:,}{'' if least == most else f' to {most:,}'} of {everyone[0]['of']:,} parameters"
    journal.event("mesh", f"mesh {grid}: {whole}")


def digest_of(part: Part) -> str:
    """SHA-256 of the whole model's weights, of which no rank ever has more than one tensor whole. Every rank calls it."""
    from lockstep.model_parallel.digest import sha256

    return sha256(part.locals, part.axes, part.names)
