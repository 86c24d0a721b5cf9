"""The average of a task's weights (EMA, SWA), by torch's own AveragedModel: when it is updated, and
that it is evaluated in place of the model. The Stepper has it compared and kept.
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
    """The model that is trained is the one that is evaluated."""

    model: AveragedModel | None = None
    """For the Stepper."""

    @property
    def found(self) -> nn.Module | None:
        """The average, once there is one."""
        return None

    def after_step(self, result: StepResult, steps: int) -> None:
        """`steps` were taken; `result` is the last one's."""

    def after_epoch(self, epochs: int) -> None:
        """`epochs` are complete."""

    @contextmanager
    def evaluated(self, forward: Forward) -> Iterator[None]:
        """`forward` runs the average, if there is one, within the block."""
        trained, found = forward.model, self.found
        forward.model = trained if found is None else found
        try:
            yield
        finally:
            forward.model = trained


class WeightAverage(NoAverage):
    """Of the model `trained`, as `task.average` makes it. Raises TaskError for anything else."""

    def __init__(self, task: Task, trained: nn.Module) -> None:
        assert task.average is not None
        found: object = task.average(trained)
        if not isinstance(found, AveragedModel):
            expected = "a torch.optim.swa_utils.AveragedModel"
            raise wrong_type("Task: average", found, expected)
        self.model = self._average = found
        self._trained = trained
        self._per, self._after = task.average_per, task.average_after

    @property
    def found(self) -> nn.Module | None:
        return self._average.module if self._average.n_averaged > 0 else None

    def after_step(self, result: StepResult, steps: int) -> None:
        if self._per == "step" and steps > self._after and result.applied:
            self._average.update_parameters(self._trained)

    def after_epoch(self, epochs: int) -> None:
        if self._per == "epoch" and epochs > self._after:
            self._average.update_parameters(self._trained)


def average_of(task: Task, trained: nn.Module) -> NoAverage:
    """As the task has it. Raises TaskError."""
    return NoAverage() if task.average is None else WeightAverage(task, trained)
