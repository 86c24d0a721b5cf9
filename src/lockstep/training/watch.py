"""Watching one metric over the evaluations: which was the best, and for how long none has been better.

Every rank watches the same numbers (evaluation is equal on all ranks, to the bit), so all come to the same decision without a message.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from lockstep.errors import TaskError
from lockstep.task import Mode


class Watch:
    """The best `value` of `metric` so far, found after `step` steps; `waited` evaluations have not been better."""

    def __init__(self, metric: str, mode: Mode) -> None:
        self.metric, self.mode = metric, mode
        self.value = math.nan
        self.step = 0
        self.waited = 0

    def better(self, metrics: Mapping[str, float], step: int) -> bool:
        """Look at one evaluation; whether it is the best so far. nan never is. Raises TaskError where the metric is not there."""
        if self.metric not in metrics:
            raise TaskError(f"Task: {self.metric!r} shall be watched, but the metrics are {', '.join(metrics)}: use one of these names")
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
        self.value, self.step, self.waited = float(state["value"]), int(state["step"]), int(state["waited"])

    def as_json(self) -> dict[str, Any]:
        return {"metric": self.metric, "value": self.value, "step": self.step}
