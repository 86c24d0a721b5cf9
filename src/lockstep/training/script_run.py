"""The run directory of a script's own loop: checkpoints, metrics, a stop that can be resumed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from lockstep.checkpoints.save_and_resume import Checkpoints
from lockstep.data.loader import Loader
from lockstep.data.windows import Window
from lockstep.errors import PeerFailed, Preempted, UsageError
from lockstep.step.step_result import StepResult
from lockstep.step.stepper import Stepper
from lockstep.training.metrics import MetricsFile, forget_after
from lockstep.training.opening import claimed_by_first
from lockstep.training.run_directory import RunDirectory


class ScriptRun:
    """Saves a Stepper, its Loader and its scheduler, and resumes from what is there. Every rank
    makes one; it closes with the world.

    Args:
        path: the folder.
        stepper: trains the model.
        loader: gives the windows.
        schedulers: at most one.
        every: steps between two checkpoints. Default: as often as costs less than 2 % of the time.
        keep: the newest checkpoints to keep.

    Raises:
        UsageError: several schedulers, or a folder that cannot be used.
    """

    def __init__(
        self,
        path: Path | str,
        stepper: Stepper,
        loader: Loader,
        schedulers: Sequence[Any],
        *,
        every: int | None,
        keep: int,
    ) -> None:
        if len(schedulers) > 1:
            raise UsageError("several-run-parts", count=len(schedulers), what="scheduler")
        world = stepper.world
        self._stepper = stepper
        self._open = world.own(ExitStack())
        claim = partial(RunDirectory.claim, path, Path(path).name)
        refused = PeerFailed("rank-0-failed", what=f"use the run directory {path}")
        self.directory = self._open.enter_context(
            claimed_by_first(world, claim, lambda code: refused)
        )
        self._checkpoints = Checkpoints(
            self.directory.checkpoints,
            stepper,
            loader,
            scheduler=schedulers[0] if schedulers else None,
            every=every,
            keep=keep,
            guard=self.directory.check,
        )
        world.heed_signals()
        self.resumed = self._checkpoints.resume() is not None
        self._file: MetricsFile | None = None
        if world.rank == 0:
            forget_after(self.directory.metrics, stepper.steps, stepper.steps)
            self._file = self._open.enter_context(MetricsFile(self.directory.metrics))
        self._unsaved = False
        self._clock = time.perf_counter()
        self.event(
            "resumed" if self.resumed else "start",
            workers=world.size,
            step=stepper.steps,
            at=datetime.now(UTC).isoformat(timespec="seconds"),
        )

    def event(self, event: str, **facts: Any) -> None:
        """Record an event."""
        self._write({"kind": "event", "event": event, **facts})

    def _write(self, record: dict[str, Any]) -> None:
        if self._file is not None:
            self.directory.check()
            self._file.write(record)

    def after_window(self, window: Window, result: StepResult, metrics: dict[str, float]) -> None:
        """Record a step. It is saved, if that is due, when the loop goes on."""
        now = time.perf_counter()
        lr = self._stepper.optimizer.param_groups[0]["lr"]
        self._write(
            {
                "kind": "step",
                "step": result.step,
                "epoch": window.epoch + 1,
                "loss": result.loss,
                "weight": result.weight,
                "samples_by_rank": list(result.samples_by_rank),
                "lr": float(lr),
                "samples_per_s": sum(result.samples_by_rank) / max(now - self._clock, 1e-9),
                "bytes_sent": result.bytes_sent,
                **metrics,
            }
        )
        self._clock = now
        self._unsaved = True
        self._stops = result.stop

    def go_on(self) -> None:
        """Before the next window: save if it is due. Raises Preempted on all ranks if one of them
        was asked to stop.
        """
        if not self._unsaved:
            return
        self._unsaved = False
        if self._stops:
            self._checkpoints.save()
            self._checkpoints.close()
            self.event("preempted", step=self._stepper.steps)
            raise Preempted(self._stepper.steps, True)
        self._checkpoints.step()

    def finish(self) -> None:
        """After the last epoch: save and wait."""
        self._unsaved = False
        self._checkpoints.close()
