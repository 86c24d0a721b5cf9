"""What a training saves in its run directory besides its records: checkpoints, step times, the
result.
"""

from __future__ import annotations

import json
import shlex
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from lockstep.checkpoints.files import Checkpoint
from lockstep.checkpoints.folders import Stored, folder_of
from lockstep.checkpoints.save_and_resume import Checkpoints
from lockstep.config.settings import Settings
from lockstep.data.loader import Loader
from lockstep.data.windows import Window
from lockstep.errors import LockstepWarning, Preempted, UsageError
from lockstep.runtime.disk import write_whole
from lockstep.step.step_result import StepResult
from lockstep.step.stepper import Stepper
from lockstep.training import perfetto
from lockstep.training.anatomy import AnatomyFile
from lockstep.training.metrics import finite, forget_after
from lockstep.training.result import Result
from lockstep.training.run_directory import RunDirectory
from lockstep.training.timeline import read

State = Callable[[], dict[str, Any]]
"""Returns what a checkpoint stores besides the Stepper's and the Loader's state."""


class MoreWorkers(Exception):
    """Raised on all ranks in the same step, after a checkpoint, so that more workers can continue
    from it.
    """


class NoStepTimes:
    """Replaces an AnatomyFile if no step times are recorded."""

    def step(self, result: StepResult, window: Window) -> None: ...


class NoSaving:
    """Saves nothing, for a training without a run directory."""

    path: Path | None = None

    @property
    def stored(self) -> Stored | None:
        """On rank 0: the newest complete checkpoint, and the size of all."""
        return None

    def resume(self, check: Callable[[Checkpoint], None]) -> Checkpoint | None:
        """Restore the Stepper and the Loader from the newest complete checkpoint and return it;
        None if there is none. `check` may refuse it.
        """
        return None

    def forget_after(self, evaluated: int) -> None:
        """Remove from the records what will happen again: later steps, and evaluations after step
        `evaluated`.
        """

    def after_step(self, state: State, *, last: bool) -> None:
        """Save if a checkpoint is due after this step. After a save, raises MoreWorkers if the
        training shall grow and is not at its last step.
        """

    def best(self, state: State, metric: str, value: float) -> None:
        """Save a checkpoint and mark it as the best by this metric so far."""

    def stop(self, state: State) -> str | None:
        """Save, wait until the checkpoint is on disk, and return the command that resumes."""
        return None

    def end(self, state: Mapping[str, Any]) -> Path | None:
        """Save the last checkpoint, wait until it is on disk, and return its folder."""
        return None

    @contextmanager
    def step_times(self, begins: Mapping[str, Any]) -> Iterator[AnatomyFile | NoStepTimes]:
        """Yield the file that records step times. `begins`: fields of its first line."""
        yield NoStepTimes()

    def finish(self, result: Result) -> None:
        """Write the files that belong to the end of a training. Every rank calls it."""


class Saving(NoSaving):
    """Saves in the run directory `run`."""

    def __init__(
        self,
        run: RunDirectory,
        settings: Settings,
        stepper: Stepper,
        loader: Loader,
        scheduler: LRScheduler | None,
    ) -> None:
        self.path = run.path
        self._run = run
        self._settings = settings
        self._stepper = stepper
        self._world = stepper.world
        self._checkpoints = Checkpoints(
            run.checkpoints,
            stepper,
            loader,
            scheduler=scheduler,
            every=settings.checkpoint_every,
            keep=settings.keep,
            keep_bytes=settings.keep_bytes,
            remote=settings.checkpoints,
            guard=run.check,
        )

    @property
    def stored(self) -> Stored | None:
        return self._checkpoints.stored

    def resume(self, check: Callable[[Checkpoint], None]) -> Checkpoint | None:
        return self._checkpoints.resume(check=check)

    def forget_after(self, evaluated: int) -> None:
        if self._world.rank == 0:
            forget_after(self._run.metrics, self._stepper.steps, evaluated)

    def after_step(self, state: State, *, last: bool) -> None:
        if self._checkpoints.step(state) and not last and self._shall_grow():
            self._checkpoints.close()
            raise MoreWorkers

    def _shall_grow(self) -> bool:
        """Whether to stop for more workers; the same on all ranks."""
        if not self._settings.grow_if_wanted:
            return self._settings.grow
        return self._world.agree(self._world.rank == 0 and self._run.wanted.exists())

    def best(self, state: State, metric: str, value: float) -> None:
        self._checkpoints.save(state(), best=(metric, value))

    def stop(self, state: State) -> str | None:
        self.end(state())
        return f"the same command and --run {shlex.quote(self._run.shown)}"

    def end(self, state: Mapping[str, Any]) -> Path | None:
        self._checkpoints.save(state)
        self._checkpoints.close()
        return folder_of(self._checkpoints.directory, self._stepper.steps)

    @contextmanager
    def step_times(self, begins: Mapping[str, Any]) -> Iterator[AnatomyFile | NoStepTimes]:
        with AnatomyFile(self._run.path, self._stepper, begins) as anatomy:
            try:
                yield anatomy
            except (Preempted, MoreWorkers):
                anatomy.end(self._stepper.steps)
                raise
            anatomy.end(self._stepper.steps)

    def finish(self, result: Result) -> None:
        self._run.check()
        self._world.barrier()  # then all ranks have closed their files
        if self._world.rank > 0:
            return
        self._write_timeline()
        self._run.check()
        # this file marks the run as finished
        write_whole(self._run.result, json.dumps(finite(result.as_json()), indent=1) + "\n")

    def _write_timeline(self) -> None:
        """Write the timeline of all ranks for Perfetto. An error is only a warning."""
        anatomy = read(self._run.path)
        if anatomy is not None:
            try:
                perfetto.write(self._run.path, anatomy)
            except OSError as error:
                file = self._run.path / perfetto.FILE
                warnings.warn(
                    f"{file} cannot be written ({error.strerror}) and is left out",
                    LockstepWarning,
                    stacklevel=2,
                )


def saving_in(
    run: RunDirectory | None,
    settings: Settings,
    stepper: Stepper,
    loader: Loader,
    scheduler: LRScheduler | None,
) -> NoSaving:
    """Return what saves in `run`, if there is one. `scheduler`: one that the Stepper does not step,
    but the training. Raises UsageError if copies of checkpoints or
    loggers are set without a run directory.
    """
    if run is not None:
        return Saving(run, settings, stepper, loader, scheduler)
    for name in ("log", "checkpoints"):
        value = getattr(settings, name)
        if value:
            raise UsageError("needs-run-directory", name=name, value=value)
    return NoSaving()
