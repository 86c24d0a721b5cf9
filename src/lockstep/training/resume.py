"""Resume a training: check that a checkpoint is of the same training, and say what has changed in
its task since.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from lockstep.checkpoints.files import Checkpoint
from lockstep.collectives.broadcast_json import said_by
from lockstep.collectives.plain_json import encoded
from lockstep.config.left_out import LeftOut
from lockstep.config.settings import Settings
from lockstep.config.task import Task
from lockstep.errors import UsageError
from lockstep.runtime.cores import processor
from lockstep.training.metrics import finite
from lockstep.training.task_digest import changes
from lockstep.world.world import World


@dataclass(frozen=True, slots=True)
class Identity:
    """What identifies a training."""

    recipe: Mapping[str, Any]
    machine: Mapping[str, str]
    digests: Mapping[str, str]
    """Digests of the task's source files and samples (task_digest.py)."""

    def check(self, checkpoint: Checkpoint, settings: Settings, world: World) -> str:
        """Return in words what has changed in the task since the checkpoint was saved; "" if
        nothing. A collective.

        Raises UsageError if the checkpoint is of another training; and in exact mode for a change,
        unless the settings allow it.
        """
        state = checkpoint.state
        saved = dict(state.get("recipe", {}))
        _check_left_out(self.recipe, saved, checkpoint)
        saved["skip"] = self.recipe["skip"]
        if "sha256" in state:  # of a finished training, which may be trained for longer
            saved |= {name: self.recipe[name] for name in ("epochs", "steps")}
        check_same(self.recipe, saved, checkpoint.folder)
        refuse = settings.exact and not settings.allow_changes
        return changed_since(state, self.digests, checkpoint.folder, world, refuse=refuse)


def recipe_of(task: Task, settings: Settings, optimizer: Optimizer) -> dict[str, Any]:
    """Return what decides the weights besides the data and the model, which are compared when they
    are loaded. `optimizer` has taken no step.
    """
    groups = [dict(group) for group in optimizer.param_groups]
    for group in groups:
        del group["params"]
    return {
        "global_batch": task.global_batch,
        "micro_batch": task.micro_batch,
        "seed": task.seed,
        "init_seed": task.init_seed,
        "clip": task.clip,
        "precision": settings.precision or task.precision,
        "epochs": settings.epochs or task.epochs,
        "steps": settings.steps,
        "skip": str(settings.left_out) or None,
        "exact": settings.exact,
        "average": task.average and f"every {task.average_per} after {task.average_after}",
        "early_stopping": None if task.early_stopping is None else str(task.early_stopping),
        "optimizer": finite(encoded(groups, "the optimizer's group")),
        "method": settings.method().recipe() or None,
    }


def _check_left_out(
    recipe: Mapping[str, Any], saved: Mapping[str, Any], checkpoint: Checkpoint
) -> None:
    """Raise a UsageError if other steps are left out now among those that the training has passed.
    Later ones may change.
    """
    step = checkpoint.step
    now = LeftOut.of(recipe["skip"]).until(step)
    before = LeftOut.of(saved.get("skip")).until(step)
    if now != before:
        difference = (
            f"skip was {str(before) or 'not given'} and is {str(now) or 'not given'} until step {step}:"
            " to leave out other steps than before, remove the checkpoints that come after them"
        )
        raise UsageError("another-training", place=str(checkpoint.folder), differences=difference)


def check_same(recipe: Mapping[str, Any], saved: Mapping[str, Any], folder: Path) -> None:
    """Raise a UsageError that names every difference."""
    differing = differences(saved, recipe)
    if differing:
        raise UsageError("another-training", place=str(folder), differences=differing)


def changed_since(
    saved: Mapping[str, Any], now: Mapping[str, str], folder: Path, world: World, *, refuse: bool
) -> str:
    """Return in words what rank 0 finds changed in the task's source files and samples since a checkpoint
    with this state was saved; "" if nothing. A collective.

    With `refuse`, raises UsageError on all ranks for a change. Older checkpoints have no digests to
    compare.
    """
    lines = changes(saved.get("digests", {}), now)
    lines = said_by(0, lines, world.control, "for the comparison with a checkpoint")
    changed = "; ".join(lines)
    if changed and refuse:
        raise UsageError("task-changed", checkpoint=str(folder), changes=changed)
    return changed


def machine() -> dict[str, str]:
    """Return what the bits of exact mode depend on besides the task."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    return {
        "torch": torch.__version__,
        "processor": processor(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "GPU": gpu,
        "threads": str(torch.get_num_threads()),
    }


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return in words each value that differs from before."""
    return "; ".join(
        f"{name} was {before.get(name)} and is {value}"
        for name, value in now.items()
        if before.get(name) != value
    )
