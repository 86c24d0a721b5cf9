"""Lockstep: data-parallel training for PyTorch in which the number of workers is a deployment
detail.

Names are resolved on first use, so that `import lockstep` (and `lockstep --help`) does not import
torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.2.0.dev0"

_HOME = {  # public name -> the module that defines it; tests/test_public.py pins this list
    "Checkpoints": "lockstep.checkpoints.save_and_resume",
    "DistributedDataParallel": "lockstep.step.data_parallel",
    "DistributedSampler": "lockstep.data.sampler",
    "EarlyStopping": "lockstep.config.task",
    "Loader": "lockstep.data.loader",
    "PreparedLoader": "lockstep.training.prepared_loader",
    "Replicas": "lockstep.step.replicas",
    "ShardedOptimizer": "lockstep.step.sharded_optimizer",
    "Stepper": "lockstep.step.stepper",
    "Task": "lockstep.config.task",
    "World": "lockstep.world.world",
    "benchmark_scaling": "lockstep.tools.bench.scaling",
    "communication_ratio": "lockstep.tools.bench.ratio",
    "evaluate": "lockstep.training.inference.evaluation",
    "evaluating": "lockstep.training.loop_functions",
    "init": "lockstep.world.world",
    "launch": "lockstep.launcher.launch",
    "log": "lockstep.training.loop_functions",
    "predict": "lockstep.training.inference.prediction",
    "prepare": "lockstep.training.prepare",
    "scale_lr": "lockstep.step.learning_rate",
    "seed": "lockstep.runtime.randomness",
    "shared_memory_hook": "lockstep.step.comm_hook",
    "stream": "lockstep.runtime.randomness",
    "total": "lockstep.training.loop_functions",
    "train": "lockstep.training.train",
    "weigh": "lockstep.training.loop_functions",
}
_MODULES = ("backend", "collectives", "errors", "runs", "testing", "timing")

__all__ = [
    "Checkpoints",
    "DistributedDataParallel",
    "DistributedSampler",
    "EarlyStopping",
    "Loader",
    "PreparedLoader",
    "Replicas",
    "ShardedOptimizer",
    "Stepper",
    "Task",
    "World",
    "backend",
    "benchmark_scaling",
    "collectives",
    "communication_ratio",
    "errors",
    "evaluate",
    "evaluating",
    "init",
    "launch",
    "log",
    "predict",
    "prepare",
    "runs",
    "scale_lr",
    "seed",
    "shared_memory_hook",
    "stream",
    "testing",
    "timing",
    "total",
    "train",
    "weigh",
]

if TYPE_CHECKING:
    from lockstep import backend, collectives, errors, runs, testing, timing
    from lockstep.checkpoints.save_and_resume import Checkpoints
    from lockstep.config.task import EarlyStopping, Task
    from lockstep.data.loader import Loader
    from lockstep.data.sampler import DistributedSampler
    from lockstep.launcher.launch import launch
    from lockstep.runtime.randomness import seed, stream
    from lockstep.step.comm_hook import shared_memory_hook
    from lockstep.step.data_parallel import DistributedDataParallel
    from lockstep.step.learning_rate import scale_lr
    from lockstep.step.replicas import Replicas
    from lockstep.step.sharded_optimizer import ShardedOptimizer
    from lockstep.step.stepper import Stepper
    from lockstep.tools.bench.ratio import communication_ratio
    from lockstep.tools.bench.scaling import benchmark_scaling
    from lockstep.training.inference.evaluation import evaluate
    from lockstep.training.inference.prediction import predict
    from lockstep.training.loop_functions import evaluating, log, total, weigh
    from lockstep.training.prepare import prepare
    from lockstep.training.prepared_loader import PreparedLoader
    from lockstep.training.train import train
    from lockstep.world.world import World, init


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return import_module(f"lockstep.{name}")
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(
        f"module 'lockstep' has no attribute {name!r}; it has {', '.join(__all__)}"
    )


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
