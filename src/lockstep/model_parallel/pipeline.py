"""Pipeline parallelism: consecutive layers on consecutive ranks. One of torch's schedules runs the
forwards and backwards of a window's micro-batches.

A rank holds one or more stages. Only activations and their gradients are sent, between neighbours.
`.grad` ends as the sum over the micro-batches, as in a loop over them in one process.

torch splits a batch along its first dimension, but a Lockstep window is a list of micro-batches of
any structure. So torch gets the numbers of the micro-batches as its batch, in a keyword that every
stage receives, and each stage looks up its inputs by number. The last stage also computes the loss:
its output is one number for torch, whatever the model returns.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from lockstep.collectives.group import Group
from lockstep.config.pipeline_schedules import PipelineSchedule
from lockstep.errors import LockstepWarning, TaskError, UsageError
from lockstep.model_parallel.stages import (
    Shape,
    between,
    check_tensor,
    described,
    last_layer,
    signature,
)
from lockstep.runtime import status


@dataclass(slots=True)
class Calls:
    """The caller's arguments for the window that is being run."""

    inputs: Sequence[Sequence[Any]]
    finish: Callable[[int, Any], Tensor]
    """(micro-batch, output) -> the tensor on which backward is called, on the last stage."""
    begin: Callable[[int, int], None]
    autocast: Callable[[], AbstractContextManager[Any]]
    problem: Exception | None = None
    """The exception that the caller's code raised, before torch wraps it."""


class StageTurn(nn.Module):
    """The module that torch calls for stage `number`, with a micro-batch's number. All stages but
    the first also get the received activation.
    """

    def __init__(
        self, stage: nn.Module, number: int, gives: Shape | None, calls: Callable[[], Calls]
    ) -> None:
        super().__init__()
        self.stage = stage
        self._number = number
        self._gives = gives  # None for the last stage
        self._calls = calls
        self._in_place = any(getattr(module, "inplace", False) for module in stage.modules())

    def forward(self, *arrived: Tensor, number: Tensor) -> Tensor:
        calls = self._calls()
        micro_batch = int(number)
        try:
            calls.begin(micro_batch, self._number)
            arguments = (
                calls.inputs[micro_batch] if self._number == 0 else map(self._ready, arrived)
            )
            with calls.autocast():
                output = self.stage(*arguments)
            return (
                calls.finish(micro_batch, output)
                if self._gives is None
                else self._checked(output, self._gives)
            )
        except Exception as error:
            calls.problem = error
            raise

    def _ready(self, arrived: Tensor) -> Tensor:
        """Return the received tensor in a form whose gradient is contiguous, and so can be sent.
        It is a copy if a layer of the stage works in place.
        """
        if not (arrived.requires_grad and torch.is_grad_enabled()):
            return arrived
        ready = arrived.clone() if self._in_place else arrived.view_as(arrived)
        ready.register_hook(torch.Tensor.contiguous)
        return ready

    def _checked(self, output: Any, gives: Shape) -> Tensor:
        """Return the output as a contiguous tensor that is no view: torch detaches it in place,
        which is impossible for views.
        """
        tensor = check_tensor(output, *last_layer(self.stage, self._number))
        if Shape.of(tensor) != gives:
            raise TaskError(
                "stage-output-varies",
                stage=self._number,
                layers=described(self.stage),
                got=str(Shape.of(tensor)),
                before=str(gives),
            )
        return (
            tensor.clone(memory_format=torch.contiguous_format)
            if tensor._is_view()
            else tensor.contiguous()
        )


class ActionTimer:
    """Measures how long a rank computes. On a GPU it records events in the stream and reads them
    when all work is done, so that the host need not wait.

    Enclose pieces of work in `busy`; `read` returns their seconds. A piece inside another piece is
    not counted twice.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._seconds = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._inside = self._notes = False

    @contextmanager
    def busy(self, phase: str) -> Iterator[None]:
        """Count the time of the block, a piece of this phase. Between two pieces the rank waits for
        other ranks: enclose all of them in `waiting`.
        """
        if self._inside:
            yield
            return
        self._inside = True
        status.waits(False)
        if self._notes:
            status.enter(phase)
        begin = self._now()
        try:
            yield
        finally:
            self._inside = False
            end = self._now()
            status.waits(True)
            if isinstance(begin, float) and isinstance(end, float):
                self._seconds += end - begin
            else:
                assert not isinstance(begin, float)
                assert not isinstance(end, float)
                self._events.append((begin, end))

    @contextmanager
    def waiting(self, *, notes: bool) -> Iterator[None]:
        """In this block, time outside of `busy` counts as waiting for other stages. `notes`:
        whether pieces are also recorded as phases of a step.
        """
        self._notes = notes
        status.waits(True)
        try:
            yield
        finally:
            status.waits(False)

    def read(self) -> float:
        """Return the seconds since the last call. On a GPU it waits until the work is done."""
        if self._events:
            torch.cuda.synchronize()
        found: float = (
            self._seconds + sum(begin.elapsed_time(end) for begin, end in self._events) / 1000
        )
        self._seconds = 0.0
        self._events.clear()
        return found

    def _now(self) -> float | torch.cuda.Event:
        if not self._cuda:
            return perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class TimedStage(PipelineStage):
    """torch's PipelineStage, with a timer and three corrections.

    - torch follows the graph from the input when it computes a backward in halves. If the input has
      no gradient (token ids from an earlier stage), the weights' gradients are lost. Here the first
      half of such a stage is the whole backward.
    - torch uses the tensor from autograd as `.grad`. It may be one tensor for two parameters (in
      x + a + b), or a buffer that receives the next gradient. Here each parameter gets a copy.
    - Neighbouring stages on one rank can be evaluated; torch's cannot.
    """

    def __init__(
        self,
        turn: StageTurn,
        number: int,
        count: int,
        *,
        device: torch.device,
        group: Any,
        clock: ActionTimer,
        takes: Shape | None,
        gives: Shape | None,
    ) -> None:
        """`takes`: the input's shape, None for the first stage. `gives`: the output's shape, None
        for the last stage.
        """
        arriving = () if takes is None else (takes.example(),)
        leaving = torch.empty((), device="meta") if gives is None else gives.example()
        super().__init__(turn, number, count, device, arriving, leaving, group=group)
        self._clock = clock
        self._in_halves = takes is None or takes.differentiable

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        with self._clock.busy("forward"):
            return super().forward_one_chunk(*args, **kwargs)

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Any = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        with self._clock.busy("backward"):
            super().backward_one_chunk(
                bwd_chunk_id, loss, full_backward or not self._in_halves, last_backward
            )

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        if not self._in_halves:
            return
        with self._clock.busy("backward"):
            fresh = [
                parameter
                for parameter in self.submod.parameters()
                if parameter.grad is None and not self.is_first
            ]
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
            for parameter in fresh:
                if parameter.grad is not None:
                    parameter.grad = torch.empty_like(parameter).copy_(parameter.grad)

    def get_local_bwd_output(self, mb_index: int) -> Any:
        return super().get_local_bwd_output(mb_index) if self.has_backward else ()  # type: ignore[no-untyped-call]

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        if self.has_backward:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)


_KEPT = 8  # schedule objects that are kept, each with its receive buffers


class Pipeline:
    """Runs this rank's stages of a pipeline.

    `stages` holds this rank's stages by number, of `count` stages on all ranks of `group` (stage s
    is on rank s modulo the group's size). They must already be on `device`. The arguments of
    `train` and `forward` may differ between ranks only in values: the number of micro-batches and
    their shapes must be equal. Raises UsageError for stages that do not fit the schedule.
    """

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        count: int,
        group: Group,
        device: torch.device,
        schedule: str = "1f1b",
        *,
        autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self.schedule = PipelineSchedule.read(schedule)
        expected = self.schedule.stages_of(group.rank, group.size)
        if count != self.schedule.count(group.size) or sorted(stages) != list(expected):
            raise UsageError(
                "wrong-stages",
                schedule=schedule,
                ranks=group.size,
                count=self.schedule.count(group.size),
                expected=list(expected),
                rank=group.rank,
                given=sorted(stages),
                total=count,
            )
        self.stages = dict(sorted(stages.items()))
        self.count, self.group, self.device = count, group, device
        self.busy = self.wall = 0.0
        """Seconds of the last `train`: `busy` in forwards and backwards, `wall` in total. Both
        exclude the time to find the shapes between stages.
        """
        self._autocast = autocast
        self._clock = ActionTimer(device)
        self._calls = Calls((), _no_loss, _no_begin, autocast)
        self._shapes: dict[Any, list[Shape]] = {}
        self._made: dict[Any, Any] = {}
        self._warned: set[str] = set()

    @property
    def idle(self) -> float:
        """The fraction of the last `train` in which this rank waited. Compare the value of rank 0,
        which begins first and ends last, with `expected_idle`.
        """
        return 1 - self.busy / self.wall if self.wall else 0.0

    def expected_idle(self, micro_batches: int, backward: float = 2.0) -> float:
        """Return the value of `idle` by the textbook formula (PipelineSchedule.bubble)."""
        return self._runs(micro_batches).bubble(self.group.size, micro_batches, backward)

    def train(
        self,
        inputs: Sequence[Sequence[Any]],
        loss: Callable[[int, Any], Tensor],
        begin: Callable[[int, int], None] | None = None,
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

        self.wall = 0.0
        self._clock.read()
        self._calls = Calls(inputs, finish, begin or _no_begin, self._autocast)
        for numbers in self._alike(inputs):
            schedule = self._runs(len(numbers))
            steps = [[number] for number in numbers] if schedule.name == "naive" else [numbers]
            for step in steps:
                made = self._ready(schedule, len(step), inputs[step[0]], train=True)
                began = perf_counter()
                self._run(made.step, step, train=True)
                self.wall += perf_counter() - began
        self.busy = self._clock.read()

    @torch.no_grad()
    def forward(self, inputs: Sequence[Sequence[Any]], done: Callable[[int, Any], None]) -> None:
        """Run only the forwards of all micro-batches; `done(micro-batch, output)` is called on the
        last stage. Collective.
        """

        def finish(number: int, output: Any) -> Tensor:
            done(number, output)
            return torch.zeros(())

        self._calls = Calls(inputs, finish, _no_begin, self._autocast)
        for numbers in self._alike(inputs):
            made = self._ready(
                self.schedule.instead(), len(numbers), inputs[numbers[0]], train=False
            )
            self._run(made.eval, numbers, train=False)

    def _alike(self, inputs: Sequence[Sequence[Any]]) -> list[list[int]]:
        """Return the micro-batches' numbers, grouped by shape, because the receive buffers of a
        schedule have one size. Find the shapes between stages for new ones.
        """
        found: dict[Any, list[int]] = {}
        for number, arguments in enumerate(inputs):
            found.setdefault(signature(arguments), []).append(number)
        for shape in found:
            if shape not in self._shapes:
                first = inputs[found[shape][0]]
                self._shapes[shape] = between(
                    self.stages, self.count, self.group, self.device, first, self._autocast
                )
        return list(found.values())

    def _runs(self, micro_batches: int) -> PipelineSchedule:
        """Return a schedule that can run this number of micro-batches. If the chosen one cannot,
        return another with the same result and more waiting, and warn once.
        """
        reason = self.schedule.why_not(self.group.size, micro_batches)
        if not reason:
            return self.schedule
        instead = self.schedule.instead()
        if str(self.schedule) not in self._warned and self.group.rank == 0:
            self._warned.add(str(self.schedule))
            bubble = instead.bubble(self.group.size, micro_batches)
            warnings.warn(
                f"pipeline: {reason}; these run in gpipe's order, with the same result, and the"
                f" ranks idle for {bubble:.0%} of it, {instead.formula}",
                LockstepWarning,
                stacklevel=4,
            )
        return instead

    def _ready(
        self,
        schedule: PipelineSchedule,
        micro_batches: int,
        arguments: Sequence[Any],
        *,
        train: bool,
    ) -> Any:
        """Return torch's schedule object for this number of micro-batches of this shape. It holds
        the receive buffers.
        """
        shape = signature(arguments)
        key = schedule, micro_batches, shape, train
        made = self._made.pop(key, None)
        if made is None:
            while len(self._made) >= _KEPT:
                del self._made[next(iter(self._made))]
            stages = [self._stage(number, self._shapes[shape]) for number in self.stages]
            made = schedule.made(stages, micro_batches, _the_loss if train else None)
        self._made[key] = made
        return made

    def _stage(self, number: int, shapes: Sequence[Shape]) -> TimedStage:
        gives = None if number == self.count - 1 else shapes[number]
        return TimedStage(
            StageTurn(self.stages[number], number, gives, lambda: self._calls),
            number,
            self.count,
            device=self.device,
            group=self.group.process_group,
            clock=self._clock,
            takes=shapes[number - 1] if number else None,
            gives=gives,
        )

    def _run(self, step: Callable[..., object], numbers: Sequence[int], *, train: bool) -> None:
        """Run torch's schedule over micro-batches. If the user's code raises, raise its exception
        in place of torch's.
        """
        indices = torch.tensor(numbers)
        try:
            with self._clock.waiting(notes=train):
                step(number=indices, target=indices, return_outputs=False)
        except Exception as error:
            self._made.clear()  # schedule objects are unusable after an exception
            if self._calls.problem is not None:
                raise self._calls.problem from None
            if isinstance(error.__cause__, Exception):
                raise error.__cause__ from None  # an exception in a backward
            raise


def _the_loss(output: Tensor, target: Tensor) -> Tensor:
    """Return the last stage's output, which is already the loss."""
    return output


def _no_loss(number: int, output: Any) -> Tensor:
    raise AssertionError("no window is being run")


def _no_begin(number: int, stage: int) -> None:
    pass
