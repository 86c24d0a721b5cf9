"""Consecutive layers on consecutive ranks: a window's micro-batches go through them in a schedule
of torch's, forward and backward.

A rank holds one stage, or several; only activations and their gradients travel, between neighbours.
Gradients end in `.grad` as sums over the micro-batches, as in a loop over them on one process.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.collectives.group import Group
from lockstep.config.pipeline_schedules import PipelineSchedule
from lockstep.errors import LockstepWarning, UsageError
from lockstep.model_parallel.shapes import Shape, between, signature
from lockstep.model_parallel.stage_turns import Calls, Clock, StageTurn, TimedStage

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
        self._clock = Clock(device)
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
                f"pipeline: {reason}; these go in gpipe's order, the same work, and the ranks idle"
                f" for {bubble:.0%} of it, {instead.formula}",
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
