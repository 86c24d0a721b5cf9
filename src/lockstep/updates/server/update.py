"""This rank as a worker of a parameter server: it draws slots, pulls parameters, pushes gradients, and waits for nobody but by the bound.

draw        what is next; a window that is complete is applied on the way, by whoever asks
pull        the newest parameters of every shard, before the first forward
push        sums, not means, to every shard: what a window is divided by is known when its last draw is there
meet        the same parameters and buffers on all ranks
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lockstep import status
from lockstep.collectives.group import Group
from lockstep.collectives.tags import alive
from lockstep.data.draws import Drawn
from lockstep.data.windows import Plan, Window
from lockstep.errors import LockstepError, PeerFailed, UsageError
from lockstep.gradients.bucket import view_of
from lockstep.gradients.facts import Facts
from lockstep.gradients.reducer import Reducer
from lockstep.launcher import asked
from lockstep.method import Method
from lockstep.updates.applied import Applied as Outcome
from lockstep.updates.meeting_buffers import MeetingBuffers
from lockstep.updates.server.applied_window import AppliedWindow
from lockstep.updates.server.counter import Answer, Applied, Apply, Counter, Course, Draw, Meet, Pushed
from lockstep.updates.server.desk import Desk
from lockstep.updates.server.masters import Masters
from lockstep.updates.server.messages import APPLY, PULL, PUSH, SQUARES, Gone, Lines
from lockstep.updates.server.serving import Serving, answer_of, question_header
from lockstep.updates.server.shard import Shard
from lockstep.updates.sharded import Sharded
from lockstep.updates.shards import Shards, check_elementwise
from lockstep.updates.update import Ended, check_belongs
from lockstep.world import World

WHY = {
    "weight": "every rank's weight is 0: the window holds nothing to learn from",
    "loss": "the loss is not finite: this update would make every weight nan",
    "norm": "the gradient's norm is not finite",
}


class Server(Sharded):
    """The optimizer holds pieces of the parameters, as in the sharded update, in memory apart from the model's. Its threads end with the world."""

    name = "server"

    def __init__(self, everyone: Group, model: nn.Module, method: Method) -> None:
        assert method.server is not None
        self._everyone, self._bound, self._by_age = everyone, method.bound, method.server.lr == "by-age"
        self._owners = everyone.size if method.server.shards is None else method.server.shards
        if self._owners > everyone.size:
            raise UsageError(f"update={method.update!r}: {self._owners} shards need as many ranks, and there are {everyone.size}")
        self._rank, self._size = everyone.rank, everyone.size  # for as long as this lives, whoever dies
        self._buffers = MeetingBuffers(model, everyone)
        self._together = True
        self._steps: int | None = None  # windows that were applied before the last meeting, over all epochs; None before the first
        self._step = 0  # that this rank was last seen at
        self._windows: int | None = None  # this rank's own, counted on from the step at which it began
        self._current: Draw | Meet | None = None
        self._course: Course | None = None
        self._said: Pushed | str | None = None
        self._version, self._followed = 0, 0
        self._shard: Shard | None = None
        self._serving: Serving | None = None
        self._records: list[AppliedWindow] = []

    def bind(self, reducer: Reducer, optimizer: Optimizer) -> None:
        check_elementwise(type(optimizer))
        check_belongs(reducer, optimizer)
        reducer.lay(reducer.order)  # and keep it: shards are slices of buckets
        self._reducer, self._optimizer, self._generation = reducer, optimizer, reducer.generation
        self._wholes = [list(group["params"]) for group in optimizer.param_groups]
        self._cut({id(parameter): state for parameter, state in optimizer.state.items()})

    def _made(self, reducer: Reducer) -> Shards:
        self._masters = Masters(reducer.parameters, reducer.layout, self._everyone, self._owners)
        plans = reducer.layout.buckets
        self._room = [torch.zeros(plan.numel, dtype=plan.dtype, pin_memory=plan.device.type == "cuda") for plan in plans]
        if self._shard is not None:
            self._shard.place(self._masters)
        return self._masters

    def follow(self) -> None:
        if self._reducer.generation != self._generation:
            raise UsageError("parameters were added, frozen or unfrozen: a server's shards are cut once; begin a new Stepper for that")
        super().follow()

    def open(self, world: World, scheduler: LRScheduler | None, clip: float | None, wants_stop: Callable[[], bool]) -> None:
        """Start to serve. Every rank calls it."""
        self._world, self._scheduler, self._clip, self._wants_stop = world, scheduler, clip, wants_stop
        if self._rank < self._owners:
            self._shard = Shard(self._masters, self._optimizer, by_age=self._by_age, stepped=self._step_scheduler)
        pids = self._everyone.host.all_gather(torch.tensor(os.getpid()), place="for the processes of a server").tolist()
        here = world.local_size == world.size
        self._desk = (
            Desk(Counter(self._size, self._bound), self._owners, lambda rank: here and not alive(pids[rank])) if self._rank == 0 else None
        )
        self._missable = here and self._rank >= self._owners
        self._lines: Lines | None = None
        if self._size > 1:
            self._lines = Lines(world.for_messages(), self._everyone, world.timeout)
            peers = [rank for rank in range(self._size) if rank != self._rank] if self._shard is not None else []
            self._serving = Serving(self._lines, peers, self._desk, self._shard)
        world.own(self)

    def close(self) -> None:
        """End the threads: every rank says that it asks no more, and hears it of all others."""
        if self._lines is None or self._world.failing:
            return
        for peer in range(self._owners):
            if peer != self._rank:
                self._lines.say_bye(peer)
        if self._serving is not None:
            self._serving.join()

    def _step_scheduler(self) -> None:
        if self._scheduler is not None:
            self._scheduler.step()

    # -- what is next --------------------------------------------------------------------------------------------------------------

    def meet_before(self, window: int) -> None:
        """Have all ranks meet when the windows below this number are applied. Every rank calls it alike."""
        if self._desk is not None:
            self._desk.meet_before(window)

    def draw(self, epoch: int, first: int, begin: int, plan: Plan) -> Drawn:
        if self._current is not None:
            raise UsageError("the next window was asked for before stepper.step() had ended the last one: call it once after each window")
        last = plan.at(plan.steps_per_epoch - 1, epoch, 0)
        self._course = course = Course(epoch, first, begin, plan.steps_per_epoch, plan.slots, len(last.filled(0, 1)))
        self._step = max(self._step, first + begin + 1 if self._steps is None else self._steps + 1)
        status.step(self._step)
        if self._together:
            self._may_be_missed(True)
        while isinstance(answer := self._ask(course), Apply):
            self._apply_window(answer)
        self._current = answer
        if isinstance(answer, Meet):
            self._may_be_missed(False)
            return Drawn(answer.place, range(0), answer.over)
        self._together = False
        return Drawn(answer.place, range(answer.first, answer.last))

    def _ask(self, course: Course) -> Answer:
        said, self._said = self._said, None
        stop = self._wants_stop()
        with status.inside("reduce"):
            if self._desk is not None:
                status.waits(True, messages=True)
                answer: Answer | int | None = self._desk.ask(self._rank, course, said, stop=stop)
                status.waits(False)
                answer = self._desk.gone if answer is None else answer
            else:
                ((header),) = self._asked([0], question_header(course, said, stop=stop))
                answer = answer_of(header)
        if isinstance(answer, Draw | Apply | Meet):
            self._look_after_threads()
            return answer
        raise self._missing(answer)

    def _look_after_threads(self) -> None:
        if self._serving is not None and self._serving.error is not None:
            raise LockstepError(f"this rank's shard of the server failed: {self._serving.error}") from self._serving.error

    def _missing(self, rank: int | None) -> LockstepError:
        """Of a rank that cannot be done without."""
        self._look_after_threads()
        if rank is None:
            return PeerFailed("the server took this rank for dead")
        held = f"{100 * self._masters.share(rank):.0f} % of the parameters"
        what = f"rank {rank}, which held {held}{' and counted the windows' if rank == 0 else ''}, has gone"
        return PeerFailed(
            f"{what}: the others cannot go on without it. From its last checkpoint, with the same --run, the training goes on"
        )

    def _asked(
        self, peers: list[int], header: list[float], leaving: list[list[Tensor]] | None = None, arriving: list[list[Tensor]] | None = None
    ) -> list[list[float]]:
        assert self._lines is not None
        nothing: list[list[Tensor]] = [[] for _ in peers]
        status.waits(True, messages=True)
        try:
            answers = self._lines.ask(peers, header, leaving or nothing, arriving or nothing)
        except Gone as error:
            raise self._missing(error.rank) from error
        status.waits(False)
        return answers

    @property
    def _others(self) -> list[int]:
        """Who holds shards beside this rank."""
        return [rank for rank in range(self._owners) if rank != self._rank]

    def _parts(self, flats: list[Tensor], rank: int) -> list[Tensor]:
        return [flat[part.start : part.stop] for flat, part in zip(flats, self._masters.of(rank), strict=True) if len(part)]

    def _may_be_missed(self, yes: bool) -> None:
        """Tell the launcher whether the rest can go on if this rank dies now."""
        if self._missable:
            asked.spare(yes)

    # -- a draw --------------------------------------------------------------------------------------------------------------------

    @property
    def dealer(self) -> Server:
        return self

    @property
    def together(self) -> bool:
        """Between a meeting and the next draw."""
        return self._together

    @property
    def between_meetings(self) -> bool:
        return not self._together

    def begin(self, window: object, steps: int) -> None:
        if not isinstance(window, Window) or not window.drawn or self._current is None:
            raise UsageError(
                "with update='server' ranks draw what they compute: call stepper.draws(loader) once, and walk the windows of that Loader's epochs, each once"
            )
        if isinstance(self._current, Draw):
            self._step = window.step + 1
            status.step(self._step)
            with status.inside("reduce"):
                self._pull()
        self._windows = steps if self._windows is None else self._windows

    def end(self, steps: int, facts: Facts, own_step: Callable[[], Outcome]) -> Ended:
        """Push what was drawn; or, where nothing was, meet the others. Shards apply it, when all of a window is there."""
        assert self._windows is not None
        self._windows += 1
        if isinstance(self._current, Meet):
            met, self._current = self._current, None
            steps = self._meet(met)
            told = Ended(steps=steps, number=self._windows, loss=met.loss, weight=met.weight, stop=met.stop, everyone=self._everyone)
        else:
            age = self._push(facts.weight, facts.loss, facts.samples_by_rank[0])
            told = Ended(steps=steps, number=self._windows, loss=facts.loss, weight=facts.weight, stop=False, gradient_age=age)
        return replace(told, windows=tuple(self._applied()))

    @torch.no_grad()
    def _pull(self) -> None:
        versions = []
        if self._others:
            into = [self._parts(self._room, rank) for rank in self._others]
            versions = [(int(header[0]), int(header[1])) for header in self._asked(self._others, [PULL], None, into)]
        if self._shard is not None:
            version, steps, tensors = self._shard.pull()
            versions.append((version, steps))
            for mine, tensor in zip(self._parts(self._room, self._rank), tensors, strict=True):
                mine.copy_(tensor)
        self._version, self._steps_seen = min(version for version, _ in versions), versions[0][1]
        places: list[Tensor] = []
        parameters: list[Tensor] = []
        for bucket, flat in zip(self._reducer.buckets, self._room, strict=True):
            for span, parameter in zip(bucket.spans, bucket.parameters, strict=True):
                places.append(view_of(flat, span, parameter))
                parameters.append(parameter)
        torch._foreach_copy_(parameters, places)

    def _push(self, weight: float, loss: float, samples: int) -> int:
        """The gradients of what was drawn. The updates that have come since they were pulled, so far."""
        draw, self._current = self._current, None
        assert isinstance(draw, Draw)
        flats = [bucket.sum if bucket.sum.device.type == "cpu" else bucket.sum.cpu() for bucket in self._reducer.buckets]
        versions = []
        if self._others:
            header = [PUSH, draw.place, draw.number, self._version, weight]
            leaving = [self._parts(flats, rank) for rank in self._others]
            versions = [int(header[0]) for header in self._asked(self._others, header, leaving)]
        if self._shard is not None:
            versions.append(self._shard.push(draw.place, draw.number, self._version, weight, self._parts(flats, self._rank)))
        self._said = Pushed(draw, weight, loss, samples, self._version)
        self._buffers.learned(weight)
        return max(versions) - self._version

    # -- a window ------------------------------------------------------------------------------------------------------------------

    def _apply_window(self, window: Apply) -> None:
        """All of its draws are there: have every shard step on it."""
        with status.inside("optimizer"):
            reason, divisor = "", window.weight
            if window.weight == 0:
                reason = "weight"
            elif not math.isfinite(window.loss):
                reason = "loss"
            elif self._clip is not None:
                squares = sum(header[0] for header in self._asked(self._others, [SQUARES, window.place])) if self._others else 0.0
                norm = math.sqrt(squares + (self._shard.squares(window.place) if self._shard is not None else 0.0)) / window.weight
                reason = "" if math.isfinite(norm) else "norm"
                divisor = window.weight / min(1.0, self._clip / (norm + 1e-6)) if not reason else window.weight
            if self._others:
                self._asked(self._others, [APPLY, window.place, divisor, bool(reason)])
            if self._shard is not None:
                self._shard.apply(window.place, divisor, skip=bool(reason))
            self._said = reason

    def _applied(self) -> list[AppliedWindow]:
        """On rank 0: the windows that were applied since this was asked last."""
        self._note_applied()
        found, self._records = self._records, []
        return found

    def _note_applied(self) -> None:
        if self._desk is not None and self._shard is not None and self._course is not None:
            self._records += [self._record(each, at, self._shard, self._course) for each, at in self._desk.applied()]

    def _record(self, each: Applied, at: float, shard: Shard, course: Course) -> AppliedWindow:
        return AppliedWindow(
            step=course.first + each.place,
            epoch=course.epoch,
            loss=each.loss / each.weight if each.weight else math.nan,
            weight=each.weight,
            samples_by_rank=each.samples_by_rank,
            age=each.age,
            lr=shard.rates.pop(each.place, math.nan),
            at=at,
            reason=WHY.get(each.reason, ""),
        )

    # -- a meeting -----------------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _meet(self, met: Meet) -> int:
        """All ranks are here, and everything is applied. Those that have died since are missed from now on. The steps that were taken."""
        assert self._course is not None
        with status.inside("reduce"):
            if len(met.living) < self._everyone.size:
                self._everyone = self._world.go_on_among(met.living)
                self._masters.move(self._everyone)
                self._buffers.move(self._everyone)
            self._pull()
            if self._shard is None:
                for _ in range(self._steps_seen - self._followed):
                    self._step_scheduler()
                self._followed = self._steps_seen
            changed = self._buffers.changed(wanted=True)
            facts = torch.tensor([self._buffers.since, *changed], dtype=torch.float64)
            self._everyone.host.all_reduce_small(facts, place="for the facts of a meeting").wait()
            total, *moved = facts.tolist()
            self._buffers.meet(moved, total)
        self._note_applied()
        if self._shard is not None:
            self._shard.forget_rates()
        self._steps = self._course.first + met.place
        self._together = True
        return self._steps

    def overwritten(self) -> Sequence[Tensor]:
        return ()

    def apply(self, divisor: float, clip: float | None, scaler: torch.amp.GradScaler | None) -> Outcome:
        raise AssertionError("a worker pushes; shards apply")

    def load_state_dict(self, state: Any) -> None:
        super().load_state_dict(state)
        self._buffers.restart()
