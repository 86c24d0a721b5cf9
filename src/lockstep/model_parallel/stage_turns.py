"""One stage as torch's schedules drive it: its turn at a micro-batch, with the caller's functions
around it, and timed.

torch cuts up a batch along its first dimension; ours is a list of micro-batches of any structure.
So it is given their numbers as the batch, as a keyword that every stage gets, and each stage looks
up what it needs. The last stage ends in the loss: what torch sees of its output is one number,
whatever the model returns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from lockstep.errors import TaskError
from lockstep.model_parallel.shapes import Shape, last_layer
from lockstep.model_parallel.stages import check_tensor, described
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


class Clock:
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
        clock: Clock,
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
