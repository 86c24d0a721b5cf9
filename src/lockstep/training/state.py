"""How far a training has come, and how well: what its checkpoints say beside the model, and what
its result is made of.

Every rank watches the same numbers (evaluation is equal on all ranks, to the bit), so all come to
the same decision without a message.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lockstep.config.task import EarlyStopping, Mode, Task
from lockstep.errors import TaskError


@dataclass(slots=True)
class BestMetric:
    """The best `value` of `metric` so far, found after `step` steps; `waited` evaluations have
    not been better.
    """

    metric: str
    mode: Mode
    value: float = math.nan
    step: int = 0
    waited: int = 0

    def better(self, metrics: Mapping[str, float], step: int) -> bool:
        """Look at one evaluation; whether it is the best so far. nan never is. Raises TaskError
        where the metric is not there.
        """
        if self.metric not in metrics:
            raise TaskError("metric-not-measured", metric=self.metric, measured=list(metrics))
        value = metrics[self.metric]
        improved = value > self.value if self.mode == "max" else value < self.value
        if improved or (math.isnan(self.value) and not math.isnan(value)):
            self.value, self.step, self.waited = value, step, 0
            return True
        self.waited += 1
        return False

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"value": self.value, "step": self.step, "waited": self.waited}

    def load(self, state: Mapping[str, Any]) -> None:
        self.value = float(state["value"])
        self.step = int(state["step"])
        self.waited = int(state["waited"])

    def as_json(self) -> dict[str, Any]:
        return {"metric": self.metric, "value": self.value, "step": self.step}


@dataclass(slots=True)
class TrainingState:
    """Equal on all ranks, as evaluations are; but for the loss of one that steps alone."""

    best: BestMetric | None
    patience: BestMetric | None
    _stopping: EarlyStopping | None
    epochs: int = 0
    """That were walked to their end."""
    evaluated: int = 0
    """The step of the last evaluation."""
    metrics: dict[str, float] = field(default_factory=dict)
    """What it found."""
    loss: float = math.nan
    """Of the last step."""
    applied: int = 0
    """Steps of earlier processes that were not skipped."""
    stopped_early: str | None = None
    unevaluated: int | None = None
    """The epoch whose evaluation was broken off, or is under way."""

    @classmethod
    def of(cls, task: Task) -> TrainingState:
        """At the beginning."""
        best = BestMetric(task.best, task.best_mode) if task.best and task.best_mode else None
        stopping = task.early_stopping
        return cls(
            best, None if stopping is None else BestMetric(stopping.metric, stopping.mode), stopping
        )

    def note(self, metrics: dict[str, float], step: int) -> BestMetric | None:
        """Take in an evaluation after `step` steps; what has watched it, if it is the best so far.

        Raises TaskError where a metric that is watched is not there."""
        self.metrics, self.unevaluated, self.evaluated = metrics, None, step
        improved = self.best is not None and self.best.better(metrics, step)
        if self.patience is not None and self._stopping is not None:
            better, most = self.patience.better(metrics, step), self._stopping.patience
            if not better and self.patience.waited >= most:
                value = (
                    f"{self.patience.metric} has not been better than {self.patience.value:.4f}"
                    f" (step {self.patience.step})"
                )
                self.stopped_early = f"{value} for {most} evaluations"
        return self.best if improved else None

    def headline(self) -> tuple[str, float]:
        """The metric that decides, else the task's first, else the loss."""
        watched = self.best or self.patience
        names = [name for name in self.metrics if name != "loss"] or list(self.metrics)
        name = watched.metric if watched else next(iter(names), "loss")
        return name, self.metrics.get(name, self.loss)

    def as_json(self) -> dict[str, Any]:
        """For a checkpoint. `finite` makes numbers of it that JSON has."""
        return {
            "epochs": self.epochs,
            "evaluated": self.evaluated,
            "metrics": self.metrics,
            "loss": self.loss,
            "best": self.best.state() if self.best else None,
            "patience": self.patience.state() if self.patience else None,
            "stopped_early": self.stopped_early,
            "unevaluated": self.unevaluated,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from what a checkpoint says. The best metric and the patience are
        taken over where the task still has them; new ones start empty.
        """
        self.epochs = int(state["epochs"])
        self.evaluated = int(state["evaluated"])
        self.loss = float(state["loss"])
        self.applied = int(state.get("applied", 1))  # not in checkpoints of version 1
        self.metrics = {name: float(value) for name, value in state["metrics"].items()}
        for watch, saved in ((self.best, state["best"]), (self.patience, state["patience"])):
            if watch is not None and saved is not None:
                watch.load(saved)
        self.stopped_early, self.unevaluated = state["stopped_early"], state["unevaluated"]
