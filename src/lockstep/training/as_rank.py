"""`lockstep train` in a process that another launcher has started as one of several ranks.

What our own launcher does before any rank starts, rank 0 does here when all have met: it claims the run directory, and tells the others.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lockstep.checks.start import compare_start
from lockstep.collectives.texts import said_by
from lockstep.errors import ExitCode, ReplicaDivergence, UsageError
from lockstep.launcher import logs
from lockstep.settings import Settings
from lockstep.training import result
from lockstep.training.claim import claimed, finished_before
from lockstep.training.opening import world_for
from lockstep.training.resolve import resolve
from lockstep.training.run_directory import RunDirectory
from lockstep.training.train import train_as
from lockstep.world import World


def train_as_rank(settings: Settings, run: Path | None, *, resume: bool = False, fresh: bool = False) -> None:
    """Train on all ranks of the launcher's world. Rank 0 prints the last line, when the others have left.

    Raises UsageError where the ranks were given different settings; SystemExit on the other ranks where rank 0 cannot use the run directory.
    """
    task = resolve(settings.task, settings.overrides)  # a mistake in it needs no meeting
    with world_for(None, settings.device) as world:
        _compare(world, {**asdict(settings), "run": None if run is None else str(run), "resume": resume, "fresh": fresh})
        with _opened(world, settings, run, resume=resume, fresh=fresh) as directory:
            if not directory.result.exists():
                logs.redirect(world.rank, "first", directory.path)
                train_as(task, settings, directory)
        first = world.rank == 0
    if first:
        print(result.last_line(result.read(directory.result)))


def _compare(world: World, given: dict[str, Any]) -> None:
    try:
        compare_start(world.group, {f"--{name.replace('_', '-')}": value for name, value in given.items()})
    except ReplicaDivergence as error:
        raise UsageError(f"the ranks were not started with the same command: {error}") from None


@contextmanager
def _opened(world: World, settings: Settings, run: Path | None, *, resume: bool, fresh: bool) -> Iterator[RunDirectory]:
    """The run directory, on all ranks: claimed by rank 0, which also chooses its name where none is given."""
    mine, problem = None, None
    if world.rank == 0:
        try:
            mine = _claimed(settings, run, resume=resume, fresh=fresh)
        except (UsageError, OSError, SystemExit) as error:
            problem = error
    code = 0 if problem is None else _code(problem)
    said = said_by(0, {"code": code, "path": mine and str(mine.path.absolute())}, world.control, "for the run directory")
    if said["code"]:
        raise problem or SystemExit(said["code"])
    with mine or RunDirectory.of_launcher(Path(said["path"])) as directory:
        yield directory


def _claimed(settings: Settings, run: Path | None, *, resume: bool, fresh: bool) -> RunDirectory:
    if run is not None and finished_before(settings, run, resume=resume, fresh=fresh):
        return RunDirectory.of_launcher(run)
    return claimed(settings, run, resume=resume, fresh=fresh)


def _code(problem: BaseException) -> int:
    if isinstance(problem, SystemExit):
        return int(problem.code or 0)
    return ExitCode.USAGE if isinstance(problem, UsageError) else ExitCode.FAILED
