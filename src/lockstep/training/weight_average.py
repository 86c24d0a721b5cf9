"""The average of a task's weights (EMA, SWA), by torch's AveragedModel: when it is updated, and how
it is evaluated in place of the model. The Stepper compares it between ranks and saves it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.optim.swa_utils import AveragedModel

from lockstep.config.task import Task
from lockstep.step.forward import Forward
from lockstep.step.step_result import StepResult
from lockstep.training.resolve import wrong_type


class NoAverage:
    """No average: the trained model is evaluated."""

    model: AveragedModel | None = None
    """The average, for the Stepper."""

    @property
    def current(self) -> nn.Module | None:
        """The average, once there is one."""
        return None

    def after_step(self, result: StepResult, steps: int) -> None:
        """Called after `steps` steps; `result` is that of the last one."""

    def after_epoch(self, epochs: int) -> None:
        """Called after `epochs` complete epochs."""

    @contextmanager
    def evaluated(self, forward: Forward) -> Iterator[None]:
        """Let `forward` run the average within the block, if there is one."""
        trained = forward.model
        forward.model = self.current or trained
        try:
            yield
        finally:
            forward.model = trained


class WeightAverage(NoAverage):
    """The average of the model `trained`, made by `task.average`. Raises TaskError if that does not
    return an AveragedModel.
    """

    def __init__(self, task: Task, trained: nn.Module) -> None:
        assert task.average is not None
        average: object = task.average(trained)
        if not isinstance(average, AveragedModel):
            expected = "a torch.optim.swa_utils.AveragedModel"
            raise wrong_type("Task: average", average, expected)
        self.model = self._average = average
        self._trained = trained
        self._per = task.average_per
        self._after = task.average_after

    @property
    def current(self) -> nn.Module | None:
        return self._average.module if self._average.n_averaged > 0 else None

    def after_step(self, result: StepResult, steps: int) -> None:
        if self._per == "step" and steps > self._after and result.applied:
            self._average.update_parameters(self._trained)

    def after_epoch(self, epochs: int) -> None:
        if self._per == "epoch" and epochs > self._after:
            self._average.update_parameters(self._trained)
