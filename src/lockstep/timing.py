"""Time the steps of a training: each phase, and when each bucket of gradients left and arrived.

Example::

    with lockstep.timing.recording(stepper) as times:
        train(stepper)
    print(times.describe())

The clock of a Stepper always runs. A recording keeps what it says, so it costs a few microseconds a
step. `trial` makes the training of a task, to time its steps.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from torch import Tensor, nn

from lockstep.config.settings import Settings
from lockstep.config.task import Task
from lockstep.data.windows import ENDLESS, Window, counted
from lockstep.gradients.bucket import BucketTimes
from lockstep.gradients.facts import numbers
from lockstep.runs import AssembledTraining, rebuilt
from lockstep.runtime.step_clock import PhaseSpan, StepTimes
from lockstep.step.forward import Forward
from lockstep.step.step_result import StepResult
from lockstep.step.stepper import Stepper
from lockstep.training.anatomy import AnatomyFile, begins
from lockstep.training.journal import Journal
from lockstep.training.run_directory import RunDirectory
from lockstep.world.world import World

__all__ = [
    "PHASES",
    "BucketTimes",
    "PhaseSpan",
    "RecordedStep",
    "Recording",
    "StepTimes",
    "Trial",
    "facts_bytes",
    "recording",
    "trial",
]

PHASES = ("data", "forward", "backward", "moving", "waits", "optimizer", "checks", "other")
"""The parts of a step's time, by their names in StepTimes. They add up to its `seconds`."""
_LONG = 10**6  # steps or epochs: length of the training for which schedulers are made


class RecordedStep(NamedTuple):
    """The times of one step on this rank."""

    times: StepTimes
    """The seconds of each phase; `times.spans` has the begin and end of each piece."""
    buckets: Sequence[BucketTimes]
    """When each bucket left and arrived. Empty on a GPU, where the host does not know it."""


class Recording:
    """The steps that a Stepper has taken since the recording began. Made by `recording`."""

    def __init__(self, stepper: Stepper, most: int) -> None:
        self._stepper = stepper
        self.steps: deque[RecordedStep] = deque(maxlen=most)
        """The latest steps, in order. On a GPU a step is added when the device has finished it."""

    def clear(self) -> None:
        """Forget the steps so far, such as those that warm up."""
        self.steps.clear()

    def medians(self) -> dict[str, float]:
        """Return the median seconds of each phase over the steps, and of "seconds", a whole step.

        Raises:
            statistics.StatisticsError: no step was recorded.
        """
        names = (*PHASES, "seconds")
        return {
            name: statistics.median(getattr(step.times, name) for step in self.steps)
            for name in names
        }

    def describe(self) -> str:
        """Return the medians as a line of text: `20 steps of 12.30 ms: data 0.10, forward ...`"""
        if not self.steps:
            return "no steps"
        medians = self.medians()
        phases = ", ".join(f"{name} {1e3 * medians[name]:.2f}" for name in PHASES)
        count = counted(len(self.steps), "step")
        return f"{count} of {1e3 * medians['seconds']:.2f} ms: {phases}"

    @property
    def parameters(self) -> list[list[nn.Parameter]]:
        """The parameters whose gradients are in each bucket, in the order in which buckets leave."""
        reducer = self._stepper.reducer
        members = []
        for bucket in reducer.layout.buckets:
            members.append([reducer.parameters[span.parameter] for span in bucket.spans])
        return members

    def _ended(self, finished: Sequence[StepTimes]) -> None:
        """Keep the steps whose times have become known."""
        on_gpu = self._stepper.world.device.type == "cuda"
        buckets = () if on_gpu else self._stepper.reducer.timeline.times()
        self.steps.extend(RecordedStep(times, buckets) for times in finished)


@contextmanager
def recording(stepper: Stepper, *, most: int = 1000) -> Iterator[Recording]:
    """Record the times of the steps that `stepper` takes in the block. Enter it between two steps.

    Args:
        stepper: the Stepper whose steps are timed.
        most: keep this many steps, the latest ones.

    Returns:
        A Recording, as the value of the `with` statement.
    """
    times = Recording(stepper, most)
    with stepper.clock.listening(times._ended):
        yield times


class Trial:
    """A training of a task on this rank, whose model is discarded. Made by `trial`."""

    def __init__(
        self, training: AssembledTraining, record: Callable[[Window, StepResult], None]
    ) -> None:
        self._training = training
        self._record = record
        self.task = training.task
        self.world: World = training.world
        self.stepper: Stepper = training.stepper
        self.loader = training.loader

    def windows(self) -> Iterator[Window]:
        """Yield windows without an end, epoch after epoch. The short last window of an epoch is left
        out.
        """
        full = 0
        for epoch in self.loader.epochs(ENDLESS):
            for window in epoch:
                samples = window.cut.stop - window.cut.start
                full = full or samples
                if samples == full:
                    yield window

    def step(self, window: Window) -> StepResult:
        """Train one window, as `lockstep train` does.

        Args:
            window: one of `windows`, or any window of a Loader with the task's batches.
        """
        result = self._training.step(window)
        self._record(window, result)
        return result

    def loss_of(self, model: nn.Module) -> Callable[[Any], tuple[Tensor, float | Tensor]]:
        """Return a function from a batch to its sum of losses and its weight, as the training
        computes them, with another model.

        Args:
            model: called with the task's inputs, in the training's precision.
        """
        forward = Forward(model, self.task, self._training.precision, self.world.device)
        return lambda batch: forward.loss(forward(batch), batch)

    def start_together(self, *, stop: bool = False) -> bool:
        """Wait for all ranks, so that they start the next step at the same time. The time since the
        last step belongs to no step.

        Args:
            stop: whether this rank has timed enough.

        Returns:
            Whether all ranks have: the same on all of them.
        """
        agreed = self.world.agree(stop, "all")
        self.stepper.clock.restart()
        return agreed


@contextmanager
def trial(
    task: Task, settings: Settings, world: World | None = None, *, records: bool = False
) -> Iterator[Trial]:
    """Make the training of a task, to time its steps. Every rank calls it.

    The learning-rate schedule is for a training that is longer than any trial. The task's callbacks
    are not called, nothing is evaluated, and nothing is saved.

    Args:
        task: what is trained.
        settings: how it is trained. `workers` is the number of ranks.
        world: the world of this rank. Default: the open one, or a new one on `settings.device`.
        records: also write the records of a training with a run directory, to a temporary folder,
            so that their cost is in the steps.
    """
    per_epoch = task.scheduler_per == "epoch"
    endless = replace(
        settings, epochs=_LONG if per_epoch else None, steps=None if per_epoch else _LONG
    )
    with rebuilt(endless, task, world) as training, ExitStack() as stack:
        record: Callable[[Window, StepResult], None] = _nothing
        if records:
            record = stack.enter_context(_records(training))
        yield Trial(training, record)


def facts_bytes(ranks: int) -> int:
    """Return the bytes of the message in which ranks exchange weights and losses in each step.

    Args:
        ranks: the number of ranks.
    """
    return 8 * numbers(ranks)


def _nothing(window: Window, result: StepResult) -> None:
    pass


@contextmanager
def _records(training: AssembledTraining) -> Iterator[Callable[[Window, StepResult], None]]:
    """Yield a function that records a step as a training does."""
    task = training.task
    stepper = training.stepper
    with TemporaryDirectory(prefix="lockstep-trial-") as folder:
        directory = RunDirectory(Path(folder))
        header = begins(
            stepper,
            micro_batch=task.micro_batch,
            global_batch=task.global_batch,
            loader_workers=training.settings.loader_workers,
        )
        with (
            Journal(
                None,
                training.world,
                directory,
                epochs=None,
                says_skips=False,
                sent=lambda: stepper.bytes_sent,
            ) as journal,
            AnatomyFile(directory.path, stepper, header) as anatomy,
        ):

            def record(window: Window, result: StepResult) -> None:
                anatomy.step(result, window)
                journal.step(window, float(training.optimizer.param_groups[0]["lr"]), result)

            yield record
