"""The result of a training: an object for Python, a file for the run directory, and the last line
of the command.

No torch at the top: the launcher prints the line after the ranks have ended.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.config.documented import documented
from lockstep.data.windows import counted

if TYPE_CHECKING:
    from torch import nn


_UNCHANGED = (
    "task",
    "epochs",
    "steps",
    "workers",
    "update",
    "reduce",
    "metrics",
    "best",
    "loss",
    "seconds",
    "stopped_early",
    "sha256",
    "average_sha256",
)


@documented
@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """The result of a training. `lockstep.train` returns it on every rank."""

    task: str
    """The task's name."""
    model: nn.Module
    """The model after the last step, on this rank's device."""
    average: nn.Module | None = None
    """The model with averaged weights, if the task has an average. `metrics` are then its own."""
    metrics: dict[str, float]
    """Values of the last evaluation by name; empty without eval_data."""
    best: dict[str, Any] | None
    """metric, value and step of the best evaluation, if the task names the metric."""
    loss: float
    """The loss of the last step's global batch, before its update."""
    headline: tuple[str, float]
    """The metric that the last line shows: name and value."""
    epochs: int
    """Completed epochs."""
    steps: int
    """Optimizer steps."""
    workers: int
    """The world size."""
    update: str
    """Who applied the update, such as "replicated"."""
    reduce: str
    """The algorithm that summed the gradients, in words."""
    seconds: float
    """Seconds of training and evaluations, without start and end."""
    stopped_early: str | None
    """Why training ended before its last epoch, if it did."""
    sha256: str
    """SHA-256 of the parameters' and buffers' raw bytes in the order of their sorted names."""
    average_sha256: str | None = None
    """SHA-256 of the averaged weights, computed alike."""
    run: Path | None
    """The run directory."""
    checkpoint: Path | None
    """The folder of the newest checkpoint."""

    def as_json(self) -> dict[str, Any]:
        """Return the contents of result.json. Paths are relative to the run directory."""
        name, value = self.headline
        checkpoint = None
        if self.checkpoint is not None and self.run is not None:
            checkpoint = str(self.checkpoint.relative_to(self.run))
        return {
            "headline": {"name": name, "value": value},
            "checkpoint": checkpoint,
            **{field: getattr(self, field) for field in _UNCHANGED},
        }


def last_line(result: Mapping[str, Any]) -> str:
    """Return the command's last line, from the contents of result.json."""
    units = ["step", "worker"]
    if result["epochs"]:  # training may end within the first one
        units.insert(0, "epoch")
    counts = ", ".join(counted(result[f"{unit}s"], unit) for unit in units)
    headline = result["headline"]
    metric = f"{headline['name']} {float(headline['value']):.4f}"
    line = (
        f"{result['task']}: {counts}, {result['update']}, {result['reduce']} | {metric} | weights"
        f" sha256 {result['sha256']}"
    )
    if result["average_sha256"]:
        line += f" | average sha256 {result['average_sha256']}"
    return line


def read(file: Path) -> dict[str, Any]:
    """Return the contents of result.json."""
    contents: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return contents
