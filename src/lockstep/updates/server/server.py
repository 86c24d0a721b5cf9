"""The server, on rank 0: it hands out slots and parameters, adds up gradients, and steps the user's
optimizer whenever a window is complete.

The server's parameters lie apart from the model's, whose values are as old as rank 0's last pull.
There is one thread for each other rank, which answers that rank's messages in order.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from threading import Condition, Thread

import torch
from torch import Tensor

from lockstep.data.window_loader import DynamicSlots, EpochCourse
from lockstep.errors import LockstepError, PeerFailed
from lockstep.updates.norm_and_clip import block_sums
from lockstep.updates.optimizer_state import CutOptimizer
from lockstep.updates.server.messages import BYE, PUSH, Messages
from lockstep.updates.server.schedule import Schedule
from lockstep.updates.shards import Shards, flat_view
from lockstep.updates.update import NOTHING, AppliedWindow, Updated

_PATIENCE_SECONDS = 5.0


class Masters(Shards):
    """The server's parameters. Rank 0 has all of them: `flats` has the layout of the reducer's
    buckets, and the user's optimizer treats `views` as parameters.
    """

    def _allocate(self) -> list[Tensor]:
        slices = zip(self.of(self._group.rank), self._layout.buckets, strict=True)
        self.flats = [
            torch.zeros(len(part), dtype=plan.dtype, device=plan.device) for part, plan in slices
        ]
        views = list(self.parts(self.flats))
        for piece, view in zip(self.pieces, views, strict=True):
            view.copy_(flat_view(self.parameters[piece.parameter]))
        return views

    def parts(self, flats: Sequence[Tensor]) -> Iterator[Tensor]:
        """Yield each parameter's part of tensors like `flats`, in the order of `views`."""
        for plan, flat in zip(self._layout.buckets, flats, strict=True):
            for span in plan.spans:
                if span.start < span.stop and len(flat):
                    yield flat[span.start : span.stop]


@dataclass(slots=True)
class _Sums:
    """What has been pushed of one window."""

    gradients: list[Tensor]
    samples: list[int]
    versions: list[int] = field(default_factory=list)
    loss: float = 0.0
    weight: float = 0.0


class Server:
    """Answers all ranks, each from a thread of its own."""

    def __init__(
        self, schedule: Schedule, updated: Updated, optimizer: CutOptimizer[Masters]
    ) -> None:
        self._schedule = schedule
        self._updated = updated
        self._optimizer = optimizer
        self._changed = Condition()
        self._error: Exception | None = None
        self._threads: list[Thread] = []
        # by rank: its epoch, its draw, and the version of the parameters that it got
        self._draws: dict[int, tuple[EpochCourse, DynamicSlots, int]] = {}
        self._sums: dict[int, _Sums] = {}
        self._version = 0  # windows that were applied or skipped
        self._steps = 0  # windows in which the optimizer stepped
        self._loss, self._weight = math.nan, 0.0  # of the last window
        self._applied: list[AppliedWindow] = []

    def serve(self, peers: Sequence[Messages]) -> None:
        """Answer the other ranks from now on."""
        for messages in peers:
            name = f"lockstep server for rank {messages.peer}"
            thread = Thread(target=self._answer, args=(messages,), name=name, daemon=True)
            self._threads.append(thread)
            thread.start()

    def close(self) -> None:
        for thread in self._threads:
            thread.join(_PATIENCE_SECONDS)

    def next(self, rank: int, course: EpochCourse) -> tuple[list[float], list[Tensor]]:
        """Return what `rank` does next, once there is something, and the newest parameters.

        The header holds the fields of DynamicSlots; the number of the optimizer's steps; and the
        loss and the weight of the window that was applied last.
        """
        with self._changed:
            self._changed.notify_all()
            while True:
                if isinstance(self._error, PeerFailed):
                    raise self._error
                if self._error is not None:
                    raise LockstepError("server-failed", error=str(self._error)) from self._error
                draw = self._schedule.next(rank, course)
                if draw is not None:
                    break
                self._changed.wait()
            self._draws[rank] = course, draw, self._version
            flats = [flat.to("cpu", copy=True) for flat in self._optimizer.shards.flats]
            return [*draw, self._steps, self._loss, self._weight], flats

    def push(self, rank: int, facts: Sequence[float], gradients: Sequence[Tensor]) -> None:
        """Add the gradients of a rank's draw. `facts`: the sum of its losses, the sum of its
        weights, its number of samples, and whether it asks to stop.
        """
        loss, weight, samples, stop = facts
        with self._changed:
            self._changed.notify_all()
            course, draw, version = self._draws[rank]
            if draw.window not in self._sums:
                zeros = [torch.zeros_like(gradient) for gradient in gradients]
                self._sums[draw.window] = _Sums(zeros, [0] * self._updated.everyone.size)
            sums = self._sums[draw.window]
            torch._foreach_add_(sums.gradients, list(gradients))
            sums.samples[rank] += int(samples)
            sums.versions.append(version)
            sums.loss += loss
            sums.weight += weight
            if stop:
                self._schedule.stop()
            if self._schedule.pushed(draw):
                try:
                    self._apply(course, draw.window, self._sums.pop(draw.window))
                except Exception as error:
                    # before another rank is told that the window is complete
                    self._error = error
                    raise

    def synchronize_before(self, step: int) -> None:
        with self._changed:
            self._schedule.synchronize_before(step)

    def applied(self) -> tuple[AppliedWindow, ...]:
        """Return the windows that were applied or skipped since the last call."""
        with self._changed:
            applied, self._applied = self._applied, []
            return tuple(applied)

    def _answer(self, messages: Messages) -> None:
        """Answer another rank until it says BYE. The main thread raises the errors."""
        try:
            while True:
                header = messages.header()
                if header[0] == BYE:
                    return
                if header[0] == PUSH:
                    flats = self._optimizer.shards.flats
                    gradients = [torch.empty_like(flat, device="cpu") for flat in flats]
                    messages.receive(gradients)
                    self.push(messages.peer, header[1:5], gradients)
                else:
                    course = EpochCourse(*map(int, header[1:7]))
                    messages.send(*self.next(messages.peer, course))
        except Exception as error:
            with self._changed:
                self._error = self._error or error
                self._changed.notify_all()

    def _apply(self, course: EpochCourse, window: int, sums: _Sums) -> None:
        """Step on a window's gradients, or skip it."""
        optimizer = self._updated.optimizer
        divisor = weight = sums.weight
        reason = ""
        if weight == 0:
            reason = NOTHING
        elif not math.isfinite(sums.loss):
            reason = "the loss is not finite: this update would make every weight nan"
        elif self._updated.clip is not None:
            squares = [block_sums(flat).double().sum().item() for flat in sums.gradients]
            norm = math.sqrt(math.fsum(squares)) / weight
            if math.isfinite(norm):
                divisor /= min(1.0, self._updated.clip / (norm + 1e-6))
            else:
                reason = "the gradient's norm is not finite"
        self._loss = sums.loss
        self._weight = weight
        self._applied.append(
            AppliedWindow(
                step=course.first + window,
                epoch=course.epoch,
                loss=sums.loss / weight if weight else math.nan,
                weight=weight,
                samples_by_rank=tuple(sums.samples),
                age=self._version - sum(sums.versions) / len(sums.versions),
                lr=float(optimizer.param_groups[0]["lr"]),
                at=time.perf_counter(),
                reason=reason,
            )
        )
        self._version += 1
        if reason:
            return
        masters = self._optimizer.shards
        means = [
            total.div_(divisor).to(flat.device)
            for total, flat in zip(sums.gradients, masters.flats, strict=True)
        ]
        for view, gradient in zip(masters.views, masters.parts(means), strict=True):
            view.grad = gradient
        optimizer.step()
        self._steps += 1
        if self._updated.scheduler is not None:
            self._updated.scheduler.step()
