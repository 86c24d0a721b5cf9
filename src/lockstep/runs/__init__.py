"""Read a run directory: settings, steps, evaluations, events, checkpoints, and where the time went.

    run = lockstep.runs.read("runs/mine")
    print(run.state, run.steps[-1].loss, run.checkpoints[-1].path)
    for spike in lockstep.runs.spikes(run.steps):
        print(f"step {spike.step}: loss {spike.loss}, usually {spike.median}")

It reads runs of `lockstep train`, `lockstep.train` and `lockstep.prepare(run=)`, also while they
train. It writes nothing, so a read-only disk is enough. It unpickles and runs nothing; only
`load_task` runs the task's file.
"""

from __future__ import annotations

from lockstep.config.settings import Settings
from lockstep.runs.jumps import Spike, spikes, worst
from lockstep.runs.reading import (
    CheckpointRecord,
    Evaluation,
    Event,
    Run,
    StepRecord,
    load_task,
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

__all__ = [
    "PHASES",
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
    "spikes",
    "worst",
]
