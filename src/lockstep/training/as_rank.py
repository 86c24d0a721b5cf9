"""`lockstep train` in a process that another launcher has started as one of several ranks.

Lockstep's own launcher claims the run directory before any rank starts. Here rank 0 claims it after
the rendezvous, and tells the other ranks.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

from lockstep.checks.start import compare_start
from lockstep.config.settings import Settings
from lockstep.errors import ReplicaDivergence, UsageError
from lockstep.launcher import logs
from lockstep.training import result
from lockstep.training.opening import claimed_by_first, world_for
from lockstep.training.resolve import resolve
from lockstep.training.run_directory import RunDirectory, claimed, finished_before
from lockstep.training.train import train_as
from lockstep.world.world import World


def train_as_rank(
    settings: Settings, run: Path | None, *, resume: bool = False, fresh: bool = False
) -> None:
    """Train on all ranks of the launcher's world. Rank 0 prints the last line after the other ranks
    have left.

    Raises UsageError if the ranks were given different settings. If rank 0 cannot use the run
    directory, the other ranks raise SystemExit.
    """
    task = resolve(settings.task, settings.overrides)  # before the rendezvous
    with world_for(None, settings.device) as world:
        launched = {"run": run and str(run), "resume": resume, "fresh": fresh}
        _compare(world, settings.as_json() | launched)
        claim = partial(_claimed, settings, run, resume=resume, fresh=fresh)
        with claimed_by_first(world, claim, SystemExit) as directory:
            if not directory.result.exists():
                logs.redirect(world.rank, "first", directory.path)
                train_as(task, settings, directory)
        first = world.rank == 0
    if first:
        print(result.last_line(result.read(directory.result)))


def _compare(world: World, options: dict[str, Any]) -> None:
    values = {f"--{name.replace('_', '-')}": value for name, value in options.items()}
    try:
        compare_start(world.group, values)
    except ReplicaDivergence as error:
        difference = f"{error.parameter} differs: {error.values['difference']}"
        raise UsageError("ranks-started-differently", difference=difference) from None


def _claimed(settings: Settings, run: Path | None, *, resume: bool, fresh: bool) -> RunDirectory:
    if run is not None and finished_before(settings, run, resume=resume, fresh=fresh):
        return RunDirectory.of_launcher(run)
    return claimed(settings, run, resume=resume, fresh=fresh)


def main(text: str) -> None:
    """Train as one of the ranks that Lockstep's launcher has started on each of several nodes."""
    job = json.loads(text)
    settings = Settings(**job["settings"])
    run = None if job["run"] is None else Path(job["run"])
    train_as_rank(settings, run, resume=job["resume"], fresh=job["fresh"])


if __name__ == "__main__":
    main(sys.argv[1])
