"""Consecutive layers on consecutive ranks: a window's micro-batches go through them in a schedule
of torch's, forward and backward.

A rank holds one stage, or several; only activations and their gradients travel, between neighbours.
Gradients end in `.grad` as sums over the micro-batches, as in a loop over them on one process.

torch cuts up a batch along its first dimension; ours is a list of micro-batches of any structure.
So it is given their numbers as the batch, as a keyword that every stage gets, and each stage looks
up what it needs. The last stage ends in the loss: what torch sees of its output is one number,
whatever the model returns.
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
    """What the caller gave for the window that is being run."""

    inputs: Sequence[Sequence[Any]]
    finish: Callable[[int, Any], Tensor]
    """(micro-batch, output) -> what the backward starts from, on the last stage."""
    begin: Callable[[int, int], None]
    autocast: Callable[[], AbstractContextManager[Any]]
    problem: Exception | None = None
    """What the caller's code raised, before torch wraps it."""


class StageTurn(nn.Module):
    """What torch calls for stage `number` with a micro-batch's number and, after the first
    stage, what has arrived.
    """

    def __init__(
        self, stage: nn.Module, number: int, gives: Shape | None, calls: Callable[[], Calls]
    ) -> None:
        super().__init__()
        self.stage = stage
        self._number = number
        self._gives = gives  # None: it is the last
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
        """What arrived, in a form whose gradient can be sent, and that may be written into where
        a layer does.
        """
        if not (arrived.requires_grad and torch.is_grad_enabled()):
            return arrived
        ready = arrived.clone() if self._in_place else arrived.view_as(arrived)
        ready.register_hook(torch.Tensor.contiguous)
        return ready

    def _checked(self, output: Any, gives: Shape) -> Tensor:
        """The output, in a form that can be sent and that torch may detach in place, which it
        does not do to views.
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
    """How long a rank was at work, without making it wait: on a GPU by events in its stream, read
    when everything is done.

    `busy` around pieces of work, `read` for their seconds. Pieces inside a piece do not count
    twice.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._seconds = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._inside = self._notes = False

    @contextmanager
    def busy(self, phase: str) -> Iterator[None]:
        """Count the block, a piece of this phase. Between two pieces a rank waits for others:
        `waiting` around them all.
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
        """In this block, what is not busy waits for other stages. `notes`: pieces are phases of
        a step.
        """
        self._notes = notes
        status.waits(True)
        try:
            yield
        finally:
            status.waits(False)

    def read(self) -> float:
        """Seconds since the last reading. On a GPU: waits until the work is done."""
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
    """torch's stage, its work counted by a clock, and three things made right.

    A backward in halves loses the weights' gradients where the input has none (token ids that
    arrive from a stage before), because torch follows the graph from the input: there the first
    half is the whole. It makes what autograd returns the `.grad`, and that may be one tensor for
    two parameters (in x + a + b), or the place where the next gradient arrives: each gets memory of
    its own. And neighbouring stages on one rank can be evaluated, which torch's cannot.
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
        """`takes` and `gives` are None before the first stage and after the last."""
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


_KEPT = 8  # shapes of micro-batches for which the places of what arrives are kept


class Pipeline:
    """This rank's stages of a pipeline, and how they are run.

    `stages` are this rank's, by number, of `count` on all ranks of `group` (stage s on rank s
    modulo its size); they are on `device` already. What every rank's `train` and `forward` are
    given must be equal on all ranks of the group but for values: the same number of micro-batches,
    of the same shapes. Raises UsageError for stages that do not go with the schedule.
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
        """Seconds of the last `train`: in forwards and backwards, and in all. Both exclude
        working out new shapes.
        """
        self._autocast = autocast
        self._clock = ActionTimer(device)
        self._calls = Calls((), _no_loss, _no_begin, autocast)
        self._shapes: dict[Any, list[Shape]] = {}
        self._made: dict[Any, Any] = {}
        self._warned: set[str] = set()

    @property
    def idle(self) -> float:
        """The fraction of the last `train` in which this rank waited. Rank 0 begins first and
        ends last: its is the textbook's.
        """
        return 1 - self.busy / self.wall if self.wall else 0.0

    def expected_idle(self, micro_batches: int, backward: float = 2.0) -> float:
        """What `idle` is by the textbook's formula."""
        return self._runs(micro_batches).bubble(self.group.size, micro_batches, backward)

    def train(
        self,
        inputs: Sequence[Sequence[Any]],
        loss: Callable[[int, Any], Tensor],
        begin: Callable[[int, int], None] | None = None,
    ) -> None:
        """Run all micro-batches forward and backward. Collective.

        `inputs` are the model's arguments, a tuple a micro-batch; only the first stage looks at
        their values. `loss(micro-batch, output)` is called on the last stage and gives the scalar
        to differentiate; gradients of all micro-batches are added up in `.grad`.
        `begin(micro-batch, stage)` is called just before each forward of a stage: seed its
        randomness there. What a stage's own code, `loss` or `begin` raises is raised as it is, on
        its rank; the others wait for messages, until their process group's timeout.
        """

        def finish(number: int, output: Any) -> Tensor:
            # torch detaches in place what it has gone back through
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
        """Run all micro-batches forward only; `done(micro-batch, output)` is called on the last
        stage. Collective.
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
        """The micro-batches' numbers, those of one shape together: a schedule has one size of
        places for what arrives.
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
        """The schedule that runs so many. Another one does the same work with more waiting; that
        is said once.
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
        """torch's schedule object for so many micro-batches of this shape, which holds a place
        for everything that arrives.
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
        """Run torch's schedule over micro-batches, and raise what the user's code raised in
        place of torch's words about it.
        """
        indices = torch.tensor(numbers)
        try:
            with self._clock.waiting(notes=train):
                step(number=indices, target=indices, return_outputs=False)
        except Exception as error:
            self._made.clear()  # they are in the middle of something
            if self._calls.problem is not None:
                raise self._calls.problem from None
            if isinstance(error.__cause__, Exception):
                raise error.__cause__ from None  # from a backward
            raise


def _the_loss(output: Tensor, target: Tensor) -> Tensor:
    """The last stage ends in the loss already."""
    return output


def _no_loss(number: int, output: Any) -> Tensor:
    raise AssertionError("no window is being run")


def _no_begin(number: int, stage: int) -> None:
    pass
