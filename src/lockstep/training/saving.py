"""What a training leaves in its run directory beside its records: checkpoints, how long its
steps took, the result.
"""

from __future__ import annotations

import json
import shlex
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lockstep.checkpoints.files import Checkpoint
from lockstep.checkpoints.folders import folder_of
from lockstep.config.settings import Settings
from lockstep.data.loader import Loader
from lockstep.data.windows import Window
from lockstep.errors import LockstepWarning, Preempted, UsageError
from lockstep.runtime.disk import write_whole
from lockstep.step.checkpointing import Checkpoints
from lockstep.step.step_result import StepResult
from lockstep.step.stepper import Stepper
from lockstep.training import perfetto
from lockstep.training.anatomy import AnatomyFile
from lockstep.training.metrics import finite, forget_after
from lockstep.training.result import Result
from lockstep.training.run_directory import RunDirectory
from lockstep.training.timeline import read

State = Callable[[], dict[str, Any]]
"""Makes what a checkpoint says beside the Stepper's and the Loader's state."""


class MoreWorkers(Exception):
    """Raised on all ranks in the same step, after a checkpoint from which more of them are to go
    on.
    """


class Untimed:
    """In place of an AnatomyFile: nobody asks where the time of steps goes."""

    def step(self, result: StepResult, window: Window, activations: int | None) -> None: ...


class Unsaved:
    """Of a training without a run directory: nothing is kept."""

    path: Path | None = None

    @property
    def newest(self) -> tuple[int, float] | None:
        """On rank 0: the step of the newest whole checkpoint, and when it was there (time.time())."""
        return None

    def resume(self, check: Callable[[Checkpoint], None]) -> Checkpoint | None:
        """Have the Stepper and the Loader go on from the newest whole checkpoint; None where
        there is none. `check` may refuse it.
        """
        return None

    def forget_after(self, evaluated: int) -> None:
        """Leave out of the records what is going to happen again: later steps, and evaluations
        after step `evaluated`.
        """

    def after_step(self, state: State, *, last: bool) -> None:
        """After every step: save where it is due. Raises MoreWorkers where it was, and the
        training, if not at its end, is to grow.
        """

    def best(self, state: State, metric: str, value: float) -> None:
        """Save, as the best by this metric so far."""

    def stop(self, state: State) -> str | None:
        """Save, and wait until it is on disk; by what command the training goes on."""
        return None

    def end(self, state: Mapping[str, Any]) -> Path | None:
        """The checkpoint of the training's end, on disk."""
        return None

    def regroup(self) -> None:
        """Go on without the ranks that have died."""

    @contextmanager
    def step_times(self, begins: Mapping[str, Any]) -> Iterator[AnatomyFile | Untimed]:
        """Records of where the time of steps goes; `begins`: what they say first."""
        yield Untimed()

    def finish(self, result: Result) -> None:
        """The training has ended. Every rank calls it."""


class Saving(Unsaved):
    """In the run directory `run`."""

    def __init__(
        self, run: RunDirectory, settings: Settings, stepper: Stepper, loader: Loader
    ) -> None:
        self.path = run.path
        self._run = run
        self._settings = settings
        self._stepper = stepper
        self._world = stepper.world
        every, remote = settings.checkpoint_every, settings.checkpoints
        self._checkpoints = Checkpoints(
            run.checkpoints, stepper, loader, every=every, remote=remote, guard=run.check
        )

    @property
    def newest(self) -> tuple[int, float] | None:
        return self._checkpoints.newest

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
        """The same on all ranks."""
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

    def regroup(self) -> None:
        self._checkpoints.regroup()

    @contextmanager
    def step_times(self, begins: Mapping[str, Any]) -> Iterator[AnatomyFile | Untimed]:
        with AnatomyFile(self._run.path, self._stepper, begins) as anatomy:
            try:
                yield anatomy
            except (Preempted, MoreWorkers):
                anatomy.end(self._stepper.steps)
                raise
            anatomy.end(self._stepper.steps)

    def finish(self, result: Result) -> None:
        self._run.check()
        self._world.barrier()  # the ranks' files are closed
        if self._world.rank > 0:
            return
        self._write_timeline()
        self._run.check()
        # whether it is there says whether the run has ended
        write_whole(self._run.result, json.dumps(finite(result.as_json()), indent=1) + "\n")

    def _write_timeline(self) -> None:
        """Of what the ranks have left, for Perfetto. A run is none the worse without."""
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
    run: RunDirectory | None, settings: Settings, stepper: Stepper, loader: Loader
) -> Unsaved:
    """Raises UsageError for copies of checkpoints, or loggers, without a run directory."""
    if run is not None:
        return Saving(run, settings, stepper, loader)
    if settings.log:
        raise UsageError("log-without-run", log=settings.log)
    if settings.checkpoints is not None:
        raise UsageError("checkpoints-without-run", checkpoints=settings.checkpoints)
    return Unsaved()
