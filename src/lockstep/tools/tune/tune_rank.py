"""`python -m lockstep.tools.tune.tune_rank DIR SECONDS`: one rank of `lockstep tune`. The settings
to begin from stand in DIR/settings.json.

Rank 0 tells every comparison on stderr as it is known and leaves DIR/answer.json.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from time import monotonic

import torch

from lockstep.config.settings import Settings
from lockstep.config.task import Task
from lockstep.runtime.cores import cores, processor
from lockstep.tools.tune.knobs import knobs
from lockstep.tools.tune.search import Found, KnobRow, search
from lockstep.tools.tune.table import progress
from lockstep.tools.tune.trials import Trials
from lockstep.training.opening import backend_of
from lockstep.training.resolve import resolve
from lockstep.training.tuned import KNOBS
from lockstep.world.world import World, init

ANSWER = "answer.json"


def main(directory: Path, seconds: float) -> None:
    settings = Settings.read(directory)
    task = resolve(settings.task, settings.overrides)
    with init(backend=backend_of(settings.device)) as world:
        began = monotonic()
        found = tune(task, settings, world, seconds)
        answer = {
            "name": task.name,
            "global_batch": task.global_batch,
            "micro_batch": task.micro_batch,
            "seconds": monotonic() - began,
            "found": found.as_json(),
            "here": {
                "device": world.device.type,
                "cpu": processor(),
                "cores": cores(),
                "threads": torch.get_num_threads(),
                "torch": torch.__version__,
            },
        }
        if world.rank == 0:
            (directory / ANSWER).write_text(json.dumps(answer), encoding="utf-8")


def tune(task: Task, settings: Settings, world: World, seconds: float) -> Found:
    """Search on the open world, in about so many seconds: the same answer on all ranks. The
    settings of a knob are its default.
    """

    def say(row: KnobRow) -> None:
        if world.rank == 0:
            print(progress(row), file=sys.stderr, flush=True)

    with Trials(task, settings, world, seconds) as trials:
        default = {name: getattr(settings, name) for name in KNOBS}
        first = trials.first(default)
        return search(knobs(settings, first.training.stepper.reducer, world), trials, say)


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]))
