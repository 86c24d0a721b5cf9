"""This rank as a worker of the parameter server on rank 0: it waits for other ranks only at the
bound.

draw         ask for the next slots, and get the newest parameters with them
push         send sums, not means: a window's divisor is known only when its last draw has arrived
synchronize  get the same parameters and buffers on all ranks
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch

from lockstep.data.window_loader import DynamicSlots, EpochCourse
from lockstep.errors import UsageError
from lockstep.gradients.facts import Facts
from lockstep.runtime import status
from lockstep.updates.optimizer_state import CutOptimizer, elementwise_pieces
from lockstep.updates.server.messages import Messages, RemoteServer
from lockstep.updates.server.schedule import Schedule
from lockstep.updates.server.server import Masters, Server
from lockstep.updates.shards import parameter_views
from lockstep.updates.synchronized_buffers import SynchronizedBuffers
from lockstep.updates.update import EndedWindow, Update, Updated

_FOREVER = timedelta(days=365)  # rank 0 waits for messages during the whole training


class ServerUpdate(Update):
    """The update by a parameter server. The optimizer of rank 0 holds copies of the parameters, the
    others hold none. `bound`: the maximum staleness, in steps.
    """

    name = "server"

    def __init__(self, updated: Updated, bound: float) -> None:
        reducer = updated.reducer
        everyone = updated.everyone
        world = updated.world
        self._updated = updated
        self._reducer = reducer
        self._everyone = everyone
        reducer.lay(reducer.order)  # keeps this order: messages have the layout of the buckets
        self._generation = reducer.generation
        self.optimizer: CutOptimizer[Masters] = elementwise_pieces(
            reducer,
            updated.optimizer,
            lambda: Masters(reducer.parameters, reducer.layout, everyone, owners=1),
        )
        self._buffers = SynchronizedBuffers(updated.model, everyone)
        self._synchronized = True
        self._draw: DynamicSlots | None = None
        self._windows: int | None = None  # this rank's, from the step at which it began
        self._first = 0  # number of the epoch's first step
        self._steps = 0  # steps of the server's optimizer that this rank's scheduler has followed
        messages = world.for_messages()
        self._server: Server | RemoteServer
        if everyone.rank == 0:
            self._server = Server(Schedule(everyone.size, bound), updated, self.optimizer)
            others = range(1, everyone.size)
            self._server.serve([Messages(messages, everyone, rank, _FOREVER) for rank in others])
        else:
            self._server = RemoteServer(Messages(messages, everyone, 0, world.timeout), reducer)
        world.own(self)

    def close(self) -> None:
        """End the server's threads, when the world closes."""
        if not self._updated.world.failing:
            self._server.close()

    def follow(self) -> None:
        if self._reducer.generation != self._generation:
            raise UsageError("layers-changed-at-a-server")
        self.optimizer.follow()
        if self._draw is not None:
            status.step(self._first + self._draw.window + (self._draw.last > 0))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._buffers.restart()

    def synchronize_before(self, step: int) -> None:
        """Make all ranks synchronize when the steps below this number are taken. Every rank calls
        it alike.
        """
        self._server.synchronize_before(step)

    @property
    def synchronized(self) -> bool:
        """Whether this rank is between a synchronization and its next draw."""
        return self._synchronized

    @torch.no_grad()
    def draw(self, course: EpochCourse) -> DynamicSlots:
        """Return this rank's next slots. The model gets the newest parameters."""
        if self._draw is not None:
            raise UsageError("window-still-open")
        with status.inside("reduce"):
            status.waits(True, messages=True)
            self._header, flats = self._server.next(self._everyone.rank, course)
            status.waits(False)
            for bucket, flat in zip(self._reducer.buckets, flats, strict=True):
                for _, parameter, value in parameter_views(flat, bucket):
                    parameter.copy_(value)
        window, first, last, over, stop = map(int, self._header[:5])
        self._first = course.first
        self._draw = DynamicSlots(window, first, last, bool(over), bool(stop))
        self._synchronized = self._synchronized and last == 0
        return self._draw

    def end(self, steps: int, facts: Facts, divisor: float) -> EndedWindow:
        """Push the gradients of the draw; if there was none, synchronize."""
        draw, self._draw = self._draw, None
        if draw is None:
            raise UsageError("slots-not-drawn")
        if self._windows is None:
            self._windows = steps
        self._windows += 1
        loss = facts.loss
        weight = facts.weight
        if draw.last:
            gradients = [bucket.sum.cpu() for bucket in self._reducer.buckets]
            values = [loss, weight, facts.samples_by_rank[0], facts.stop]
            status.waits(True, messages=True)  # until rank 0 takes them
            self._server.push(self._everyone.rank, values, gradients)
            status.waits(False)
            self._buffers.learned(weight)
        else:
            self._synchronize()
            steps = self._first + draw.window
            loss, weight = self._header[6:8]
        return EndedWindow(
            steps=steps,
            number=self._windows,
            loss=loss,
            weight=weight,
            stop=draw.stop,
            synchronized=self._synchronized,
            windows=self._server.applied(),
        )

    @torch.no_grad()
    def _synchronize(self) -> None:
        scheduler = self._updated.scheduler
        steps = int(self._header[5])
        if scheduler is not None and self._everyone.rank > 0:
            for _ in range(steps - self._steps):
                scheduler.step()
        self._steps = steps
        with status.inside("reduce"):
            values = [self._buffers.since, *self._buffers.changed(wanted=True)]
            facts = torch.tensor(values, dtype=torch.float64)
            self._everyone.host.all_reduce(facts, place="for the facts of a synchronization").wait()
            total, *moved = facts.tolist()
            self._buffers.synchronize(moved, total)
        self._synchronized = True
