"""Old module paths of public names, for one release: `from lockstep.stepper import Stepper`
still works.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

NOW = {
    "lockstep.checkpointing": "lockstep.step.checkpointing",
    "lockstep.comm_hook": "lockstep.step.comm_hook",
    "lockstep.data_parallel": "lockstep.step.data_parallel",
    "lockstep.inference": "lockstep.training.inference",
    "lockstep.inference.evaluate": "lockstep.training.inference.evaluation",
    "lockstep.inference.predict": "lockstep.training.inference.prediction",
    "lockstep.learning_rate": "lockstep.step.learning_rate",
    "lockstep.mesh": "lockstep.config",
    "lockstep.mesh.parts": "lockstep.config.parts",
    "lockstep.replicas": "lockstep.step.replicas",
    "lockstep.settings": "lockstep.config.settings",
    "lockstep.sharded_optimizer": "lockstep.step.sharded_optimizer",
    "lockstep.stepper": "lockstep.step.stepper",
    "lockstep.streams": "lockstep.runtime.randomness",
    "lockstep.task": "lockstep.config.task",
}


class OldPaths(MetaPathFinder, Loader):
    """Finds a module by its old path, and returns the module at the new path."""

    def find_spec(
        self, fullname: str, path: object, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return (
            ModuleSpec(
                fullname, self, is_package=fullname in ("lockstep.inference", "lockstep.mesh")
            )
            if fullname in NOW
            else None
        )

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = import_module(NOW[spec.name])
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Restore the module's own spec, which the import system has just replaced. The module
        itself has already run, under its new path.
        """
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state


sys.meta_path.insert(0, OldPaths())
