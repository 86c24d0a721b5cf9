"""This rank as a worker of a parameter server: it draws slots, pulls parameters, pushes gradients,
and waits for other ranks only at the bound.

draw        ask for the next slots; a complete window is applied first, by the rank that asks
pull        get the newest parameters of every shard, before the first forward
push        send sums, not means, to every shard: a window's divisor is known only when its last
            draw has arrived
synchronize get the same parameters and buffers on all ranks
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from lockstep.config.parallelism import Parallelism
from lockstep.data.epoch import DynamicSlots
from lockstep.data.windows import Plan, Window
from lockstep.errors import UsageError
from lockstep.gradients.facts import Facts
from lockstep.launcher import preemption
from lockstep.launcher.processes import DEAD, state
from lockstep.runtime import status
from lockstep.updates.optimizer_state import CutOptimizer, elementwise_pieces
from lockstep.updates.server.all_shards import AllShards
from lockstep.updates.server.counter import (
    Answer,
    Apply,
    Counter,
    Draw,
    EpochCourse,
    Pushed,
    Synchronize,
    WindowDone,
)
from lockstep.updates.server.serving import Dispatcher, answer_of, question_header
from lockstep.updates.server.shard import Masters, ServerShard
from lockstep.updates.synchronized_buffers import SynchronizedBuffers
from lockstep.updates.update import NOTHING, AppliedWindow, EndedWindow, Update, Updated

WHY = {
    "weight": NOTHING,
    "loss": "the loss is not finite: this update would make every weight nan",
    "norm": "the gradient's norm is not finite",
}


class ServerUpdate(Update):
    """The update by a parameter server. The optimizer holds pieces of the parameters, as in the
    sharded update, in memory apart from the model's.
    """

    name = "server"

    def __init__(self, updated: Updated, method: Parallelism) -> None:
        assert method.server is not None
        self._updated, self._reducer = updated, updated.reducer
        self._everyone = everyone = updated.everyone
        self._rank = everyone.rank
        owners = everyone.size if method.server.shards is None else method.server.shards
        if owners > everyone.size:
            raise UsageError(
                "too-many-shards", update=method.update, shards=owners, ranks=everyone.size
            )
        self._shards = AllShards(everyone, owners)
        self.optimizer: CutOptimizer[Masters] = elementwise_pieces(
            self._reducer, updated.optimizer, lambda: self._shards.cut(self._reducer)
        )
        self._reducer.lay(self._reducer.order)  # keeps this order: shards are slices of buckets
        self._generation = self._reducer.generation
        self._buffers = SynchronizedBuffers(updated.model, everyone)
        self._synchronized = True
        # windows applied before the last synchronization, over all epochs; None before the first
        self._steps: int | None = None
        self._step = 0  # the last step that this rank was known to be at
        # this rank's windows, counted from the step at which it began
        self._windows: int | None = None
        self._current: Draw | Synchronize | None = None
        self._course: EpochCourse | None = None
        self._said: Pushed | str | None = None
        self._followed = 0  # how many steps of the optimizer this rank's scheduler has followed
        self._records: list[AppliedWindow] = []
        self._shards.own(
            updated.optimizer, by_age=method.server.lr == "by-age", stepped=self._step_scheduler
        )
        self._dispatcher: Dispatcher | None = None
        self._open(Counter(everyone.size, method.bound))

    def _open(self, counter: Counter) -> None:
        """Start to serve. Every rank calls it."""
        world = self._updated.world
        pids = self._everyone.host.all_gather(
            torch.tensor(os.getpid()), place="for the processes of a server"
        ).tolist()
        here = world.local_size == world.size
        if self._rank == 0:
            self._dispatcher = Dispatcher(
                counter, self._shards.owners, lambda rank: here and state(pids[rank]) == DEAD
            )
        self._missable = here and self._rank >= self._shards.owners
        self._shards.serve(world, self._dispatcher)

    def follow(self) -> None:
        if self._reducer.generation != self._generation:
            raise UsageError("layers-changed-at-a-server")
        self.optimizer.follow()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._buffers.restart()

    def _step_scheduler(self) -> None:
        if self._updated.scheduler is not None:
            self._updated.scheduler.step()

    # -- what is next -----------------------------------------------------------------------------

    def synchronize_before(self, window: int) -> None:
        """Make all ranks synchronize when the windows below this number are applied. Every rank
        calls it alike.
        """
        if self._dispatcher is not None:
            self._dispatcher.synchronize_before(window)

    def draw(self, epoch: int, first: int, begin: int, plan: Plan) -> DynamicSlots:
        if self._current is not None:
            raise UsageError("window-still-open")
        last = plan.at(plan.steps_per_epoch - 1, epoch, 0)
        self._course = course = EpochCourse(
            epoch, first, begin, plan.steps_per_epoch, plan.slots, len(last.filled(0, 1))
        )
        self._step = max(self._step, first + begin + 1 if self._steps is None else self._steps + 1)
        status.step(self._step)
        if self._synchronized:
            self._may_be_missed(True)
        while isinstance(answer := self._ask(course), Apply):
            self._apply_window(answer)
        self._current = answer
        if isinstance(answer, Synchronize):
            self._may_be_missed(False)
            return DynamicSlots(answer.place, range(0), answer.over)
        self._synchronized = False
        return DynamicSlots(answer.place, range(answer.first, answer.last))

    def _ask(self, course: EpochCourse) -> Answer:
        said, self._said = self._said, None
        stop = self._updated.wants_stop()
        with status.inside("reduce"):
            if self._dispatcher is not None:
                status.waits(True, messages=True)
                answer: Answer | int | None = self._dispatcher.ask(
                    self._rank, course, said, stop=stop
                )
                status.waits(False)
                answer = self._dispatcher.gone if answer is None else answer
            else:
                (header,) = self._shards.ask([0], question_header(course, said, stop=stop))
                answer = answer_of(header)
        if isinstance(answer, Draw | Apply | Synchronize):
            self._shards.look_after_threads()
            return answer
        raise self._shards.missing(answer)

    def _may_be_missed(self, yes: bool) -> None:
        """Tell the launcher whether the other ranks can continue if this rank dies now."""
        if self._missable:
            preemption.spare(yes)

    # -- a draw -----------------------------------------------------------------------------------

    @property
    def slot_source(self) -> ServerUpdate:
        return self

    @property
    def synchronized(self) -> bool:
        """Whether this rank is between a synchronization and its next draw."""
        return self._synchronized

    @property
    def between_synchronizations(self) -> bool:
        return not self._synchronized

    def begin(self, window: object, steps: int) -> None:
        if not isinstance(window, Window) or not window.drawn or self._current is None:
            raise UsageError("slots-not-drawn")
        if isinstance(self._current, Draw):
            self._step = window.step + 1
            status.step(self._step)
            with status.inside("reduce"):
                self._shards.pull(self._reducer.buckets)
        self._windows = steps if self._windows is None else self._windows

    def end(self, steps: int, facts: Facts, divisor: float) -> EndedWindow:
        """Push the gradients of the draw; if there was none, synchronize. Shards apply a
        window when all of it has arrived.
        """
        assert self._windows is not None
        self._windows += 1
        now, self._current = self._current, None
        if isinstance(now, Synchronize):
            steps = self._synchronize(now)
            told = EndedWindow(
                steps=steps,
                number=self._windows,
                loss=now.loss,
                weight=now.weight,
                stop=now.stop,
                everyone=self._everyone,
            )
        else:
            assert isinstance(now, Draw)
            age = self._shards.push(now, facts.weight, self._reducer.buckets)
            self._said = Pushed(
                now, facts.weight, facts.loss, facts.samples_by_rank[0], self._shards.version
            )
            self._buffers.learned(facts.weight)
            told = EndedWindow(
                steps=steps,
                number=self._windows,
                loss=facts.loss,
                weight=facts.weight,
                stop=False,
                gradient_age=age,
            )
        self._note_applied()
        records, self._records = self._records, []
        return replace(told, windows=tuple(records))

    # -- a window ---------------------------------------------------------------------------------

    def _apply_window(self, window: Apply) -> None:
        """Have every shard step on a window, all draws of which have been pushed."""
        clip = self._updated.clip
        with status.inside("optimizer"):
            reason, divisor = "", window.weight
            if window.weight == 0:
                reason = "weight"
            elif not math.isfinite(window.loss):
                reason = "loss"
            elif clip is not None:
                norm = math.sqrt(self._shards.squares(window.place)) / window.weight
                reason = "" if math.isfinite(norm) else "norm"
                divisor = (
                    window.weight / min(1.0, clip / (norm + 1e-6)) if not reason else window.weight
                )
            self._shards.apply(window.place, divisor, skip=bool(reason))
            self._said = reason

    def _note_applied(self) -> None:
        """On rank 0: record the windows that were applied since the last call."""
        if (
            self._dispatcher is not None
            and self._shards.mine is not None
            and self._course is not None
        ):
            self._records += [
                _record(each, at, self._shards.mine, self._course)
                for each, at in self._dispatcher.applied()
            ]

    # -- synchronization --------------------------------------------------------------------------

    @torch.no_grad()
    def _synchronize(self, now: Synchronize) -> int:
        """Synchronize: all ranks are here, and everything is applied. Continue without the ranks
        that have died. Return the number of steps taken.
        """
        assert self._course is not None
        with status.inside("reduce"):
            if len(now.living) < self._everyone.size:
                self._everyone = self._updated.world.go_on_among(now.living)
                self._shards.move(self._everyone)
                self._buffers.move(self._everyone)
            self._shards.pull(self._reducer.buckets)
            if self._shards.mine is None:
                for _ in range(self._shards.steps - self._followed):
                    self._step_scheduler()
                self._followed = self._shards.steps
            changed = self._buffers.changed(wanted=True)
            facts = torch.tensor([self._buffers.since, *changed], dtype=torch.float64)
            self._everyone.host.all_reduce(facts, place="for the facts of a synchronization").wait()
            total, *moved = facts.tolist()
            self._buffers.synchronize(moved, total)
        self._note_applied()
        if self._shards.mine is not None:
            self._shards.mine.forget_rates()
        self._steps = self._course.first + now.place
        self._synchronized = True
        return self._steps


def _record(each: WindowDone, at: float, shard: ServerShard, course: EpochCourse) -> AppliedWindow:
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
