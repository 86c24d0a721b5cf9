"""Read a run directory: settings, steps, evaluations, events, checkpoints, and where the time went.

Example::

    run = lockstep.runs.read("runs/mine")
    print(run.state, run.steps[-1].loss, run.checkpoints[-1].path)
    for spike in lockstep.runs.spikes(run.steps):
        print(f"step {spike.step}: loss {spike.loss}, usually {spike.median}")

    with lockstep.runs.rebuilt(run.settings) as training:  # on one process: workers=1
        training.load(run.path / "checkpoints", 200)

It reads runs of `lockstep train`, `lockstep.train` and `lockstep.prepare(run=)`, also while they
train. It writes nothing, so a read-only disk is enough. It unpickles and runs nothing; only
`load_task` and `rebuilt` run the task's file.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from lockstep.config.settings import Settings
from lockstep.runs.jumps import Spike, spikes, worst
from lockstep.runs.reading import (
    CheckpointRecord,
    Evaluation,
    Event,
    Run,
    StepRecord,
    number,
    read,
)
from lockstep.training.metrics import finite
from lockstep.training.timeline import (
    PHASES,
    Begin,
    Lane,
    MemoryLine,
    Pause,
    Start,
    StepsLine,
    Timeline,
)

if TYPE_CHECKING:
    from lockstep.runs.rebuilding import load_task, rebuilt
    from lockstep.training.assembled import AssembledTraining

__all__ = [
    "PHASES",
    "AssembledTraining",
    "Begin",
    "CheckpointRecord",
    "Evaluation",
    "Event",
    "Lane",
    "MemoryLine",
    "Pause",
    "Run",
    "Settings",
    "Spike",
    "Start",
    "StepRecord",
    "StepsLine",
    "Timeline",
    "finite",
    "load_task",
    "number",
    "read",
    "rebuilt",
    "spikes",
    "worst",
]

_LATE = {  # they need torch, and reading a run does not
    "AssembledTraining": "lockstep.training.assembled",
    "load_task": "lockstep.runs.rebuilding",
    "rebuilt": "lockstep.runs.rebuilding",
}


def __getattr__(name: str) -> object:
    if name in _LATE:
        return getattr(import_module(_LATE[name]), name)
    raise AttributeError(f"module 'lockstep.runs' has no attribute {name!r}")
