"""Lockstep: data-parallel training for PyTorch in which the number of workers is a deployment detail.

Names are resolved on first use, so that `import lockstep` (and `lockstep --help`) does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0.dev0"

_HOME = {  # public name -> the module that defines it; tests/test_public.py pins this list
    "Checkpoints": "lockstep.checkpointing",
    "DistributedDataParallel": "lockstep.data_parallel",
    "DistributedSampler": "lockstep.data.sampler",
    "EarlyStopping": "lockstep.task",
    "Loader": "lockstep.data.loader",
    "Replicas": "lockstep.replicas",
    "ShardedOptimizer": "lockstep.sharded_optimizer",
    "Stepper": "lockstep.stepper",
    "Task": "lockstep.task",
    "World": "lockstep.world",
    "benchmark_scaling": "lockstep.measure.scaling.benchmark",
    "communication_ratio": "lockstep.measure.ratio",
    "evaluate": "lockstep.inference.evaluate",
    "init": "lockstep.world",
    "launch": "lockstep.launcher.spawn",
    "predict": "lockstep.inference.predict",
    "scale_lr": "lockstep.learning_rate",
    "seed": "lockstep.streams",
    "shared_memory_hook": "lockstep.comm_hook",
    "stream": "lockstep.streams",
    "train": "lockstep.training.train",
}
_MODULES = ("backend", "collectives", "errors", "testing")

__all__ = [
    "Checkpoints",
    "DistributedDataParallel",
    "DistributedSampler",
    "EarlyStopping",
    "Loader",
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
    "init",
    "launch",
    "predict",
    "scale_lr",
    "seed",
    "shared_memory_hook",
    "stream",
    "testing",
    "train",
]

if TYPE_CHECKING:
    from lockstep import backend, collectives, errors, testing
    from lockstep.checkpointing import Checkpoints
    from lockstep.comm_hook import shared_memory_hook
    from lockstep.data.loader import Loader
    from lockstep.data.sampler import DistributedSampler
    from lockstep.data_parallel import DistributedDataParallel
    from lockstep.inference.evaluate import evaluate
    from lockstep.inference.predict import predict
    from lockstep.launcher.spawn import launch
    from lockstep.learning_rate import scale_lr
    from lockstep.measure.ratio import communication_ratio
    from lockstep.measure.scaling.benchmark import benchmark_scaling
    from lockstep.replicas import Replicas
    from lockstep.sharded_optimizer import ShardedOptimizer
    from lockstep.stepper import Stepper
    from lockstep.streams import seed, stream
    from lockstep.task import EarlyStopping, Task
    from lockstep.training.train import train
    from lockstep.world import World, init


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return import_module(f"lockstep.{name}")
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'lockstep' has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
