"""The run directory of a script's own loop: checkpoints, metrics, a stop that can be resumed."""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from torch.optim import Optimizer

from lockstep.checkpoints.folders import folder_of, keep_only, written
from lockstep.checkpoints.save_and_resume import Checkpoints
from lockstep.collectives.broadcast_json import everybodys
from lockstep.collectives.plain_json import decoded, encoded
from lockstep.config.retention import ALL
from lockstep.config.settings import Settings
from lockstep.data.loader import Loader
from lockstep.data.windows import Window
from lockstep.errors import PeerFailed, Preempted, UsageError
from lockstep.runtime.disk import write_whole
from lockstep.step.step_result import StepResult
from lockstep.step.stepper import Stepper
from lockstep.training.anatomy import AnatomyFile, begins
from lockstep.training.journal import Journal
from lockstep.training.metrics import forget_after
from lockstep.training.opening import claimed_by_first
from lockstep.training.run_directory import RunDirectory

_OTHERS = "others"


class LastPosition:
    """The Loader's position after the window that was trained last. The loop draws the next window
    before a checkpoint is saved: its body may do more after the optimizer's step.
    """

    def __init__(self, loader: Loader) -> None:
        self._loader = loader
        self._state = loader.state_dict()

    def move(self) -> None:
        """Note the position now, after a window and before the next one is drawn."""
        self._state = self._loader.state_dict()

    def state_dict(self) -> dict[str, Any]:
        return self._state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._state = dict(state)
        self._loader.load_state_dict(state)


class ScriptCheckpoints:
    """The checkpoints of all that a script's loop trains. Each model has its own; those of the first
    are saved last, so what they have a step of, all have.

    Args:
        folder: of the first model's checkpoints; the others' are beside it.
        steppers: train the models, one each. They step together.
        loader: gives the windows.
        schedulers: at most one for each optimizer.
        others: what else is saved: dicts, and objects with `state_dict` and `load_state_dict`,
            whose states are equal on all ranks.
        every: steps between two checkpoints. Default: as often as costs less than 2 % of the time.
        keep: as for Checkpoints.
        guard: called before files are written; it may raise.

    Raises:
        UsageError: several schedulers of an optimizer.
    """

    def __init__(
        self,
        folder: Path,
        steppers: Sequence[Stepper],
        loader: Loader,
        schedulers: Sequence[Any],
        others: Sequence[Any],
        *,
        every: int | None,
        keep: int | str | None,
        guard: Callable[[], None],
    ) -> None:
        self.position = LastPosition(loader)
        self._stepper = steppers[0]
        self._others = {f"{number} {type(one).__name__}": one for number, one in enumerate(others)}
        self._all = []
        for number, stepper in enumerate(steppers):
            self._all.append(
                Checkpoints(
                    folder.with_name(f"{folder.name}-{number + 1}") if number else folder,
                    stepper,
                    None if number else self.position,
                    scheduler=_scheduler_of(stepper.optimizer, schedulers),
                    every=every,
                    keep=ALL if number else keep,
                    guard=guard,
                )
            )

    def resume(self) -> bool:
        """Load the newest checkpoint that all models have. Return whether there is one."""
        first, *rest = self._all
        checkpoint = first.resume()
        if checkpoint is None:
            return False
        for checkpoints in rest:
            other = checkpoints.resume(checkpoint.step)
            if other is None or other.step != checkpoint.step:
                names = [path.name for path in written(checkpoints.directory)]
                folder = checkpoints.directory
                raise UsageError("no-such-step", step=checkpoint.step, run=folder, there=names)
        saved = checkpoint.state[_OTHERS]
        if list(saved) != list(self._others):
            now = ", ".join(self._others) or "nothing"
            differences = f"{', '.join(saved) or 'nothing'} before, now {now}"
            raise UsageError("another-training", place="the run", differences=differences)
        for name, one in self._others.items():
            state = decoded(saved[name])
            if isinstance(one, dict):
                one.clear()
                one.update(state)
            else:
                one.load_state_dict(state)
        return True

    def save_if_due(self) -> None:
        """Save all models if the first one's next checkpoint is due."""
        if self._all[0].is_due:
            self._save()

    def save_rest(self) -> None:
        """Save the steps that are not saved yet, and wait until they are on disk."""
        if self._stepper.steps > self._all[0].saved:
            self._save()
        for checkpoints in self._all:
            checkpoints.wait()

    def _save(self) -> None:
        first, *rest = self._all
        for checkpoints in rest:
            checkpoints.save()
        for checkpoints in self._all:
            checkpoints.wait()
        for checkpoints in rest:
            self._remove_others(checkpoints)
        states = {}
        for name, one in self._others.items():
            state = one if isinstance(one, dict) else dict(one.state_dict())
            states[name] = encoded(state, f"the state of {name}")
        self._compare(states)
        first.save({_OTHERS: states})

    def _remove_others(self, checkpoints: Checkpoints) -> None:
        """Remove the checkpoints of another model of which the first has none. The first has not
        saved the newest step yet, and may have to fall back to any of its own.
        """
        if self._stepper.world.rank == 0:
            directory = checkpoints.directory
            newest = folder_of(directory, self._stepper.steps)
            common = [directory / path.name for path in written(self._all[0].directory)]
            keep_only(directory, [newest, *common])

    def _compare(self, states: Mapping[str, Any]) -> None:
        """Raise UsageError on all ranks if one of them has another state of a saved object."""
        digests = {}
        for name, state in states.items():
            text = json.dumps(state, sort_keys=True)
            digests[name] = hashlib.sha256(text.encode()).hexdigest()
        control = self._stepper.world.control
        for rank, other in enumerate(everybodys(digests, control, "for what a run saves")):
            for name, digest in digests.items():
                if other[name] != digest:
                    raise UsageError("saved-state-differs", name=name, rank=rank)


class ScriptRun:
    """Saves the training of a script's loop in a run directory, records its steps, and resumes what
    is there. Every rank makes one; it closes with the world.

    Args:
        path: the folder.
        steppers: train the models.
        loader: gives the windows.
        schedulers, others, options: of `ScriptCheckpoints`.

    Raises:
        UsageError: a folder that cannot be used, and what ScriptCheckpoints refuses.
    """

    def __init__(
        self,
        path: Path | str,
        steppers: Sequence[Stepper],
        loader: Loader,
        schedulers: Sequence[Any],
        others: Sequence[Any],
        **options: Any,
    ) -> None:
        self._stepper = stepper = steppers[0]
        world = stepper.world
        self._open = world.own(ExitStack())
        claim = partial(RunDirectory.claim, path, Path(path).name, extends=True)
        refused = PeerFailed("rank-0-failed", what=f"use the run directory {path}")
        self.directory = self._open.enter_context(
            claimed_by_first(world, claim, lambda code: refused)
        )
        self._checkpoints = ScriptCheckpoints(
            self.directory.checkpoints,
            steppers,
            loader,
            schedulers,
            others,
            guard=self.directory.check,
            **options,
        )
        world.heed_signals()
        self.resumed = self._checkpoints.resume()
        if world.rank == 0:
            self._begin_files()
        self._journal = self._open.enter_context(
            Journal(
                None,
                world,
                self.directory,
                epochs=None,
                says_skips=False,
                sent=lambda: stepper.bytes_sent,
            )
        )
        recipe = loader.recipe
        begin = begins(
            stepper,
            micro_batch=recipe.get("micro_batch"),
            global_batch=recipe.get("global_batch"),
            loader_workers=loader.num_workers,
        )
        self._anatomy = self._open.enter_context(AnatomyFile(self.directory.path, stepper, begin))
        self._unsaved = False
        self._stops = False
        self._unrecorded: tuple[Window, float, StepResult] | None = None
        self._began = time.perf_counter()
        self._journal.event(
            "resumed" if self.resumed else "start",
            workers=world.size,
            step=stepper.steps,
            at=datetime.now(UTC).isoformat(timespec="seconds"),
        )
        world.own(self)

    def _begin_files(self) -> None:
        """Write rank 0's files as of the step at which the training begins."""
        steps = self._stepper.steps
        settings = Settings.of_script(Path(sys.argv[0]).name, self._stepper.world.size)
        settings.write(self.directory.path)
        self.directory.result.unlink(missing_ok=True)
        forget_after(self.directory.metrics, steps, steps)
        if self.resumed:
            line = f"lockstep: resumed at step {steps} from {self.directory.shown}"
            print(line, file=sys.stderr)

    def stepped(self, window: Window, result: StepResult) -> None:
        """A step was taken. It is saved, if that is due, when the loop goes on, and recorded with
        what the rest of the loop's body has logged.
        """
        self._unsaved = True
        lr = float(self._stepper.optimizer.param_groups[0]["lr"])  # before the body's scheduler
        self._unrecorded = window, lr, result
        self._checkpoints.position.move()

    def record(self, metrics: Mapping[str, float]) -> None:
        """Record the last step with these metrics."""
        if self._unrecorded is None:
            return
        window, lr, result = self._unrecorded
        self._unrecorded = None
        self._stops = result.stop
        self._anatomy.step(result, window)
        self._journal.step(window, lr, result, metrics)

    def go_on(self) -> None:
        """Before the next window: save if it is due. Raises Preempted on all ranks if one of them
        was asked to stop.
        """
        if not self._unsaved:
            return
        self._unsaved = False
        if self._stops:
            self._checkpoints.save_rest()
            if self._stepper.world.rank == 0:
                where = f"step {self._stepper.steps} in {self.directory.shown}"
                print(f"lockstep: saved {where}; the same command goes on", file=sys.stderr)
            self._journal.event("preempted", step=self._stepper.steps)
            raise Preempted(self._stepper.steps, True)
        self._checkpoints.save_if_due()

    def finish(self) -> None:
        """The loop is over: save the steps that are not saved yet, wait until they are on disk, and
        mark the run as finished.
        """
        self._unsaved = False
        self.record({})
        self._checkpoints.save_rest()
        if self._stepper.world.rank == 0:
            self.directory.check()
            ended = {
                "workers": self._stepper.world.size,
                "steps": self._stepper.steps,
                "seconds": time.perf_counter() - self._began,
            }
            write_whole(self.directory.result, json.dumps(ended, indent=1) + "\n")

    def close(self) -> None:
        """The world closes: the loop was left, or the script has ended without it."""
        if not self._stepper.world.failing:
            if not self._stops:
                self.finish()
            self._anatomy.end(self._stepper.steps)


def _scheduler_of(optimizer: Optimizer, schedulers: Sequence[Any]) -> Any:
    """Return the optimizer's scheduler, None if it has none."""
    own = [scheduler for scheduler in schedulers if scheduler.optimizer is optimizer]
    if len(own) > 1:
        raise UsageError("several-schedulers", count=len(own))
    return own[0] if own else None
