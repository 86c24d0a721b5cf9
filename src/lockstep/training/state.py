"""The progress of a training, which its checkpoints store besides the model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lockstep.config.task import Mode, Task
from lockstep.data.windows import counted
from lockstep.errors import TaskError


@dataclass(slots=True)
class BestMetric:
    """The best `value` of `metric` so far, from the evaluation after `step` steps. The last
    `waited` evaluations were not better.
    """

    metric: str
    mode: Mode
    value: float = math.nan
    step: int = 0
    waited: int = 0

    def better(self, metrics: Mapping[str, float], step: int) -> bool:
        """Take in one evaluation and return whether it is the best so far; nan never is. Raises
        TaskError if the metric is missing.
        """
        if self.metric not in metrics:
            raise TaskError("metric-not-measured", metric=self.metric, measured=list(metrics))
        value = metrics[self.metric]
        improved = value > self.value if self.mode == "max" else value < self.value
        if improved or (math.isnan(self.value) and not math.isnan(value)):
            self.value = value
            self.step = step
            self.waited = 0
            return True
        self.waited += 1
        return False

    def state(self) -> dict[str, Any]:
        """Return the values that a checkpoint stores."""
        return {"value": self.value, "step": self.step, "waited": self.waited}

    def load(self, state: Mapping[str, Any]) -> None:
        self.value = float(state["value"])
        self.step = int(state["step"])
        self.waited = int(state["waited"])

    def as_json(self) -> dict[str, Any]:
        return {"metric": self.metric, "value": self.value, "step": self.step}


@dataclass(slots=True)
class TrainingState:
    """The progress of a training. It is equal on all ranks, except `loss` if a rank steps alone."""

    best: BestMetric | None
    patience: BestMetric | None
    _limit: int
    """Evaluations without a new best value of `patience` after which training ends."""
    epochs: int = 0
    """Completed epochs."""
    evaluated: int = 0
    """The step of the last evaluation."""
    metrics: dict[str, float] = field(default_factory=dict)
    """The metrics of the last evaluation."""
    loss: float = math.nan
    """The loss of the last step."""
    applied: int = 0
    """Steps of earlier processes that were not skipped."""
    stopped_early: str | None = None
    unevaluated: int | None = None
    """The epoch whose evaluation was interrupted or is in progress."""

    @classmethod
    def of(cls, task: Task) -> TrainingState:
        """Return the state at the start of a training."""
        best = BestMetric(task.best, task.best_mode) if task.best and task.best_mode else None
        stopping = task.early_stopping
        if stopping is None:
            return cls(best, None, 0)
        return cls(best, BestMetric(stopping.metric, stopping.mode), stopping.patience)

    def record(self, metrics: dict[str, float], step: int) -> BestMetric | None:
        """Take in an evaluation after `step` steps; return the best metric if it has improved.

        Raises TaskError if a watched metric is missing."""
        self.metrics = metrics
        self.unevaluated = None
        self.evaluated = step
        improved = self.best is not None and self.best.better(metrics, step)
        watched = self.patience
        if (
            watched is not None
            and not watched.better(metrics, step)
            and watched.waited >= self._limit
        ):
            self.stopped_early = (
                f"{watched.metric} has not improved on {watched.value:.4f} (step"
                f" {watched.step}) for {counted(self._limit, 'evaluation')}"
            )
        return self.best if improved else None

    def headline(self) -> tuple[str, float]:
        """Return name and value of the watched metric, else of the first, else of the loss."""
        watched = self.best or self.patience
        others = [name for name in self.metrics if name != "loss"]
        name = "loss"
        if watched is not None:
            name = watched.metric
        elif others:
            name = others[0]
        return name, self.metrics.get(name, self.loss)

    def as_json(self) -> dict[str, Any]:
        """Return the values that a checkpoint stores. `finite` makes valid JSON numbers of them."""
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
        """Continue from the state in a checkpoint. The best metric and the patience are restored if
        the task still has them; new ones start empty.
        """
        self.epochs = int(state["epochs"])
        self.evaluated = int(state["evaluated"])
        self.loss = float(state["loss"])
        self.applied = int(state.get("applied", 1))  # not in checkpoints of version 1
        self.metrics = {name: float(value) for name, value in state["metrics"].items()}
        for watch, saved in ((self.best, state["best"]), (self.patience, state["patience"])):
            if watch is not None and saved is not None:
                watch.load(saved)
        self.stopped_early = state["stopped_early"]
        self.unevaluated = state["unevaluated"]
