"""Pipeline parallelism: consecutive layers on consecutive ranks. One of torch's schedules runs the
forwards and backwards of a window's micro-batches.

Only activations and their gradients are sent, between neighbours. `.grad` ends as the sum over the
micro-batches, as in a loop over them in one process.

torch splits a batch along its first dimension, but a Lockstep window is a list of micro-batches of
any structure. So torch gets the numbers of the micro-batches as its batch, in a keyword that every
stage receives, and each stage looks up its inputs by number. The last stage also computes the loss:
its output is one number for torch, whatever the model returns.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from lockstep.collectives.group import Group
from lockstep.errors import LockstepWarning, TaskError
from lockstep.model_parallel import schedules
from lockstep.model_parallel.stages import (
    Shape,
    check_tensor,
    described,
    shapes_between,
    signature,
)
from lockstep.runtime import status


def _no_begin(number: int, stage: int) -> None:
    """Do nothing before a forward."""


_CACHED = 8  # schedule objects that are kept, each with its receive buffers


@dataclass(slots=True)
class Calls:
    """The caller's arguments for the window that is being run."""

    inputs: Sequence[Sequence[Any]]
    finish: Callable[[int, Any], Tensor]
    """(micro-batch, output) -> the tensor on which backward is called, on the last stage."""
    begin: Callable[[int, int], None]
    training: bool
    problem: Exception | None = None
    """The exception that the caller's code raised, before torch wraps it."""


class StageTurn(nn.Module):
    """The module that torch calls for a rank's stage, with a micro-batch's number. All stages but
    the first also get the received activation.
    """

    def __init__(self, pipeline: Pipeline, sends: Shape | None) -> None:
        super().__init__()
        self.stage = pipeline.stage
        self._pipeline = pipeline
        self._sends = sends  # None for the last stage
        self._in_place = any(getattr(module, "inplace", False) for module in self.stage.modules())

    def forward(self, *received: Tensor, number: Tensor) -> Tensor:
        calls = self._pipeline.calls
        rank = self._pipeline.group.rank
        micro_batch = int(number)
        try:
            calls.begin(micro_batch, rank)
            arguments: Iterable[Any] = calls.inputs[micro_batch]
            if rank > 0:
                arguments = map(self._ready, received)
            with self._pipeline.autocast():
                output = self.stage(*arguments)
            if self._sends is None:
                return calls.finish(micro_batch, output)
            return self._checked(output, self._sends)
        except Exception as error:
            calls.problem = error
            raise

    def _ready(self, received: Tensor) -> Tensor:
        """Return the received tensor in a form whose gradient is contiguous, and so can be sent.
        It is a copy if a layer of the stage works in place.
        """
        if not (received.requires_grad and torch.is_grad_enabled()):
            return received
        ready = received.clone() if self._in_place else received.view_as(received)
        ready.register_hook(torch.Tensor.contiguous)
        return ready

    def _checked(self, output: Any, sends: Shape) -> Tensor:
        """Return the output as a contiguous tensor that is no view: torch detaches it in place,
        which is impossible for views.
        """
        tensor = check_tensor(output, described(self.stage))
        if Shape.of(tensor) != sends:
            raise TaskError(
                "stage-output-varies",
                stage=self._pipeline.group.rank,
                layers=described(self.stage),
                got=str(Shape.of(tensor)),
                before=str(sends),
            )
        if tensor._is_view():
            return tensor.clone(memory_format=torch.contiguous_format)
        return tensor.contiguous()


class TimedStage(PipelineStage):
    """torch's PipelineStage. Its forwards and backwards are work on the step clock; between them,
    the rank waits for other stages.
    """

    submod: StageTurn

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        with self._working("forward"):
            return super().forward_one_chunk(*args, **kwargs)

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> None:
        with self._working("backward"):
            super().backward_one_chunk(*args, **kwargs)

    @contextmanager
    def _working(self, phase: str) -> Iterator[None]:
        status.waits(False)
        if self.submod._pipeline.calls.training:
            status.enter(phase)
        try:
            yield
        finally:
            status.waits(True)


class Pipeline:
    """Runs this rank's stage of a pipeline.

    Stage s is on rank s of `group`. It must already be on `device`. The arguments of `train` and
    `forward` may differ between ranks only in values: the number of micro-batches and their shapes
    must be equal.
    """

    def __init__(
        self,
        stage: nn.Module,
        group: Group,
        device: torch.device,
        schedule: str = "1f1b",
        *,
        autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self.stage = stage
        self.group = group
        self.device = device
        self.schedule = schedule
        self.autocast = autocast
        self.calls: Calls  # of the window that is being run
        self._shapes: dict[Any, list[Shape]] = {}
        self._schedules: dict[Any, Any] = {}
        self._warned = False

    def train(
        self,
        inputs: Sequence[Sequence[Any]],
        loss: Callable[[int, Any], Tensor],
        begin: Callable[[int, int], None] = _no_begin,
    ) -> None:
        """Run all micro-batches forward and backward. Collective.

        `inputs` are the model's arguments, a tuple for each micro-batch; only the first stage uses
        their values. `loss(micro-batch, output)` is called on the last stage and returns the scalar
        to differentiate; `.grad` gets the sum of the gradients of all micro-batches.
        `begin(micro-batch, stage)` is called just before each forward of a stage: seed its random
        numbers there. An exception from a stage's own code, `loss` or `begin` is raised unchanged
        on its rank; the other ranks wait for messages, until the timeout of their process group.
        """

        def finish(number: int, output: Any) -> Tensor:
            # after its backward, torch detaches this tensor in place
            return loss(number, output).clone()

        self.calls = Calls(inputs, finish, begin, training=True)
        for numbers in self._by_shape(inputs):
            schedule = self._fitting(len(numbers))
            if schedule == "naive":
                for number in numbers:
                    self._run(schedule, [number])
            else:
                self._run(schedule, numbers)

    @torch.no_grad()
    def forward(self, inputs: Sequence[Sequence[Any]], done: Callable[[int, Any], None]) -> None:
        """Run only the forwards of all micro-batches; `done(micro-batch, output)` is called on the
        last stage. Collective.
        """

        def finish(number: int, output: Any) -> Tensor:
            done(number, output)
            return torch.zeros(())

        self.calls = Calls(inputs, finish, _no_begin, training=False)
        for numbers in self._by_shape(inputs):
            self._run("gpipe", numbers)

    def _by_shape(self, inputs: Sequence[Sequence[Any]]) -> list[list[int]]:
        """Return the micro-batches' numbers, grouped by shape, because the receive buffers of a
        schedule have one size. Find the shapes between stages for new ones.
        """
        groups: dict[Any, list[int]] = {}
        for number, arguments in enumerate(inputs):
            groups.setdefault(signature(arguments), []).append(number)
        for shape, numbers in groups.items():
            if shape not in self._shapes:
                self._shapes[shape] = shapes_between(
                    self.stage, self.group, self.device, inputs[numbers[0]], self.autocast
                )
        return list(groups.values())

    def _fitting(self, micro_batches: int) -> str:
        """Return a schedule that can run this number of micro-batches. If the chosen one cannot,
        return gpipe, which gives the same result, and warn once.
        """
        if schedules.fits(self.schedule, self.group.size, micro_batches):
            return self.schedule
        if not self._warned and self.group.rank == 0:
            idle = schedules.bubble("gpipe", self.group.size, micro_batches)
            warnings.warn(
                f"pipeline: {self.schedule} needs at least as many micro-batches as stages, and"
                f" there are {micro_batches} for {self.group.size}. These run in gpipe's order,"
                f" with the same result, and the ranks idle for {idle:.0%} of it",
                LockstepWarning,
                stacklevel=3,
            )
        self._warned = True
        return "gpipe"

    def _run(self, schedule: str, numbers: Sequence[int]) -> None:
        """Run torch's schedule over micro-batches of one shape. If the user's code raises, raise
        its exception in place of torch's.
        """
        indices = torch.tensor(numbers)
        shape = signature(self.calls.inputs[numbers[0]])
        runner = self._schedule(schedule, len(numbers), shape)
        step = runner.step if self.calls.training else runner.eval
        status.waits(True)
        try:
            step(number=indices, target=indices, return_outputs=False)
        except Exception as error:
            self._schedules.clear()  # schedule objects are unusable after an exception
            cause = self.calls.problem or error.__cause__  # the second: in a backward
            if isinstance(cause, Exception):
                raise cause from None
            raise
        finally:
            status.waits(False)

    def _schedule(self, schedule: str, micro_batches: int, shape: Any) -> Any:
        """Return torch's schedule object for this number of micro-batches of this shape. It holds
        the receive buffers.
        """
        training = self.calls.training
        key = schedule, micro_batches, shape, training
        runner = self._schedules.pop(key, None)
        if runner is None:
            while len(self._schedules) >= _CACHED:
                oldest = next(iter(self._schedules))
                del self._schedules[oldest]
            kind = Schedule1F1B if schedule == "1f1b" else ScheduleGPipe
            loss = _the_loss if training else None
            stage = self._stage(self._shapes[shape])
            runner = kind(stage, micro_batches, loss_fn=loss, scale_grads=False)
        self._schedules[key] = runner
        return runner

    def _stage(self, shapes: Sequence[Shape]) -> TimedStage:
        rank = self.group.rank
        count = self.group.size
        received = (shapes[rank - 1].example(),) if rank > 0 else ()
        sends = shapes[rank] if rank + 1 < count else None
        output = torch.empty((), device="meta") if sends is None else sends.example()
        return TimedStage(
            StageTurn(self, sends),
            rank,
            count,
            self.device,
            received,
            output,
            group=self.group.process_group,
        )


def _the_loss(output: Tensor, target: Tensor) -> Tensor:
    """Return the last stage's output, which is already the loss."""
    return output
