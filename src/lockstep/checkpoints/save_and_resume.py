"""`lockstep.Checkpoints`: save a training, and resume it at any number of ranks.

checkpoints = lockstep.Checkpoints("checkpoints", stepper, loader, every=100, keep=3)
checkpoints.resume()                       # from the newest complete checkpoint, if there is one
for epoch in loader.epochs(10):
    for window in epoch:
        ...
        stepper.step()
        checkpoints.step()                 # saves in the background, if a save is due
checkpoints.close()                        # saves steps that are not saved yet, and waits
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from time import perf_counter, time
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakMethod

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from lockstep.checkpoints import files, folders
from lockstep.checkpoints.files import COMPARED, CONFIG, WITNESSED, Checkpoint
from lockstep.checkpoints.manifest import STATE, believed
from lockstep.checkpoints.pieces import check_storable
from lockstep.checkpoints.saver import FIRST, Saver, steps_until_next
from lockstep.checkpoints.stepper_state import restore, snapshot
from lockstep.collectives.broadcast_json import said_by
from lockstep.collectives.plain_json import decoded, encoded
from lockstep.config import knob
from lockstep.config.retention import Retention
from lockstep.errors import (
    DamagedCheckpoint,
    LockstepError,
    LockstepWarning,
    PeerFailed,
    UsageError,
)
from lockstep.runtime import preemption, status
from lockstep.step.stepper import Stepper

if TYPE_CHECKING:
    from lockstep.checkpoints.remote import Remote

Extra = Mapping[str, Any] | Callable[[], Mapping[str, Any]] | None
"""Further content of a checkpoint: a mapping of JSON values, or a function that returns one."""


class Resumable(Protocol):
    """A Loader, or another object whose `state_dict` is the position in the data. It must be
    equal on all ranks.
    """

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class Checkpoints:
    """Saves one Stepper and its Loader into `directory`, and resumes from there at any number of
    ranks.

    A checkpoint holds the model, optimizer, scheduler, scaler, average, step, and the position in
    the data. All ranks write it in the background. It contains no pickled objects. A checkpoint is
    either complete or absent.

    Replicas are compared before every save (`Stepper.check_replicas`). If they differ, nothing
    is saved, and checkpoints after the last good comparison are set aside: `resume` ignores them.

    Every rank creates one, and all ranks call the same methods in the same order. If a background
    save fails, the next call raises a LockstepError on all ranks.

    Example::

        checkpoints = lockstep.Checkpoints("runs/mine/checkpoints", stepper, loader, every=100)
        checkpoints.resume()  # from the newest one, if there is any
        for epoch in loader.epochs(10):
            for window in epoch:
                ...  # micro-batches, stepper.step()
                checkpoints.step()
        checkpoints.close()

    Args:
        directory: a folder that all ranks can read and write.
        stepper: the Stepper to save.
        loader: a Loader, or another object whose `state_dict` is the position in the data.
        scheduler: a learning rate scheduler that your loop steps. One that the Stepper steps is
            saved with the Stepper. Step one that counts epochs where an epoch begins: `if
            scheduler.last_epoch < epoch.number: scheduler.step()`. What a loop does after an
            epoch's last step is not in the checkpoint of that step.
        every: steps between two checkpoints. Default: as often as costs less than 2 % of the time.
        keep: number of newest checkpoints to keep, or "all". Default: the newest two, and fewer the
            older they are: the weights of any step can be computed again from a checkpoint that is
            at most half as many steps away as the step is old. The best one and the last one that
            was compared always stay.
        keep_bytes: bytes that all checkpoints may take, such as "20GB". The oldest are removed; the
            newest, the best and the last compared one stay. While one is written, it comes on top.
        remote: a folder, or a URL that fsspec supports, such as s3://bucket/run. Each checkpoint is
            copied there; `resume` looks there too. A failed upload is a warning; the next save
            uploads again. `close` raises if the last upload failed.
        guard: called on every rank before anything is written; it raises LockstepError if
            `directory` must not be written to any more.
        read_only: change nothing in `directory`: `step`, `save` and `close` save nothing. For a
            look at a step of a finished or a running training.

    Raises:
        UsageError: `remote` with `read_only`; a scheduler belongs to the optimizer, but neither the
            Stepper nor this object was given one. `save` raises it if the scheduler was created
            later. A ReduceLROnPlateau leaves no trace in the optimizer: this cannot notice that it
            is missing.
    """

    def __init__(
        self,
        directory: Path | str,
        stepper: Stepper,
        loader: Resumable | None = None,
        *,
        scheduler: LRScheduler | None = None,
        every: int | None = None,
        keep: int | str | None = None,
        keep_bytes: int | str | None = None,
        remote: str | None = None,
        guard: Callable[[], None] = lambda: None,
        read_only: bool = False,
    ) -> None:
        if every is not None:
            knob.whole("every", every)
        if read_only and remote is not None:
            expected = "None with read_only=True: a copy is loaded by way of the folder"
            raise UsageError("wrong-value", name="remote", value=remote, expected=expected)
        self._retention = Retention.of(keep, keep_bytes)
        check_storable(stepper.model)
        self.directory = Path(directory)
        self._read_only = read_only
        self._stepper = stepper
        self._loader = loader
        self._every = every
        self._scheduler = scheduler
        self._check_scheduler()
        # after a resume, the steps of a scheduler that may lag behind the epoch
        self._lag: int | None = None
        self._remote = None if remote is None else _remote(remote)
        world = stepper.world
        self._world = world
        everyone = world.subgroup(range(world.size)) if world.size > 1 else None
        self._saver = world.own(Saver(self.directory, everyone, guard))
        self._resumes = False  # whether a restarted program would resume
        self._next = FIRST if every is None else 0
        stepper.synchronize_before(self._due())
        self._began: tuple[float, int] = (perf_counter(), stepper.steps)
        self.saved = stepper.steps
        """The step that was saved or loaded last."""
        self.stored: folders.Stored | None = None
        """On rank 0: the newest complete checkpoint, and the size of all."""
        self._extra: Extra = None
        # A strong reference would form a cycle, which keeps the loader's processes alive until
        # garbage collection.
        set_aside = WeakMethod(self._set_aside)

        def on_divergence(compared: int | None) -> str:
            method = set_aside()
            return "" if method is None else method(compared)

        for check in (stepper.replicas, stepper.witness):
            if check is not None and not read_only:
                check.on_divergence.append(on_divergence)

    # -- resuming ---------------------------------------------------------------------------------

    def resume(
        self,
        step: int | None = None,
        *,
        check: Callable[[Checkpoint], None] = lambda checkpoint: None,
    ) -> Checkpoint | None:
        """Load the newest complete checkpoint, or the newest one that is not after `step`.

        A damaged checkpoint causes a warning, which names its file and the steps lost.

        Args:
            step: ignore the checkpoints after this step. They stay.
            check: called with the checkpoint before any state changes; it may raise.

        Returns:
            The checkpoint that was loaded; None if there is none.

        Raises:
            DamagedCheckpoint: the checkpoint holds what no training has.
            UsageError: the checkpoint belongs to another model, optimizer or data.
        """
        if step is not None:
            knob.whole("step", step, 0)
        self._resumes = not self._read_only
        folder = self._agreed(lambda: self._chosen(step))
        if folder is None:
            return None
        # rank 0 has just verified the files: its host need not verify them again
        trusted = self._world.rank == 0 or self._world.control.memory is not None
        checkpoint = files.read(self.directory / folder, trusted=trusted)
        if checkpoint.state.get("training") is None:
            raise UsageError("checkpoint-of-a-model-only", folder=str(checkpoint.folder))
        with believed(checkpoint.folder / STATE):
            check(checkpoint)
            restore(self._stepper, checkpoint, checkpoint.state["training"], self._scheduler)
            if self._stepper.replicas is not None:
                self._stepper.replicas.compared = checkpoint.compared
            if self._stepper.witness is not None:
                self._stepper.witness.witnessed = checkpoint.witnessed
            if self._loader is not None:
                position = decoded(checkpoint.state["data"])
                self._loader.load_state_dict(position)
                self._record_lag(position)
        self._began = perf_counter(), self._stepper.steps
        self.saved = self._stepper.steps
        if self._world.rank == 0:
            written_at = checkpoint.folder.stat().st_mtime
            size = sum(map(folders.size_of, folders.written(self.directory)))
            self.stored = folders.Stored(checkpoint.step, written_at, size)
        if self._resumes and self._world.rank == 0:
            preemption.leave_mark(preemption.RESUMED)
        if self._every is None:
            self._next = self._stepper.steps + FIRST
        self._stepper.synchronize_before(self._due())
        return checkpoint

    def _record_lag(self, position: Mapping[str, Any]) -> None:
        """Record whether the checkpoint was saved after an epoch's last step, and before the loop
        stepped its scheduler for that epoch.
        """
        if self._scheduler is not None and position.get("step_in_epoch") == 0:
            stepped = self._scheduler.last_epoch
            self._lag = stepped if stepped < position["epoch"] else None

    def _warn_of_lag(self) -> None:
        """Warn if the first step after a resume had the learning rate of the epoch before."""
        lag = self._lag
        self._lag = None
        assert self._scheduler is not None
        if self._scheduler.last_epoch == lag and self._world.rank == 0:
            warnings.warn(
                "training resumed between the last step of an epoch and its scheduler.step(), which"
                " was lost: the learning rate is one epoch behind. Step the scheduler where an"
                " epoch begins: if scheduler.last_epoch < epoch.number: scheduler.step()",
                LockstepWarning,
                stacklevel=3,
            )

    def _due(self) -> int:
        """The step after which the next save is due."""
        if self._every is None:
            return self._next
        return (self._stepper.steps // self._every + 1) * self._every

    def _chosen(self, step: int | None) -> str | None:
        """Choose the checkpoint to load, and return its folder's name. Rank 0 calls it, and
        verifies every byte.
        """
        if not self._read_only:
            folders.sweep(self.directory)
        newest = folders.newest(self.directory, until=step)
        latest = 0 if newest is None else folders.step_of(newest)
        chosen, damaged = files.newest_whole(self.directory, until=step)
        if self._remote is not None:
            for remote_step in reversed(self._remote.steps(until=step)):
                if chosen is not None and remote_step <= chosen.step:
                    break
                latest = max(latest, remote_step)
                try:
                    chosen = self._remote.fetch(remote_step, self.directory)
                except DamagedCheckpoint as error:
                    damaged.append(error)
            self._fetch_best(self._remote)
        if damaged:
            fallback = "there is no other"
            if chosen is not None:
                lost = latest - chosen.step
                fallback = f"falling back to {chosen.folder.name} ({lost} steps lost)"
            rejected = "; ".join(map(str, damaged))
            warnings.warn(f"rejected {rejected}; {fallback}", LockstepWarning, stacklevel=4)
        return None if chosen is None else chosen.folder.name

    def _fetch_best(self, remote: Remote) -> None:
        """Fetch the best checkpoint from `remote` if `directory` has no best checkpoint."""
        marked = remote.best() if files.best(self.directory) is None else None
        if marked is not None:
            step, metric, value = marked
            folder = folders.folder_of(self.directory, step)
            with suppress(DamagedCheckpoint):
                best = files.read(folder) if folder.exists() else remote.fetch(step, self.directory)
                files.mark_best(best.folder, metric, value)

    def _agreed(self, choose: Callable[[], str | None]) -> str | None:
        """Return rank 0's choice on all ranks. If `choose` fails on rank 0, all ranks raise."""
        chosen: str | None = None
        problem: Exception | None = None
        if self._world.rank == 0:
            try:
                chosen = choose()
            except (LockstepError, OSError) as error:
                problem = error
        message = said_by(
            0,
            {"folder": chosen, "failed": problem is not None},
            self._world.control,
            "for the choice of a checkpoint",
        )
        if message["failed"]:
            raise problem or PeerFailed(
                "rank-0-failed", what=f"find a usable checkpoint in {self.directory}"
            )
        folder: str | None = message["folder"]
        return folder

    # -- saving -----------------------------------------------------------------------------------

    def step(self, extra: Extra = None) -> bool:
        """Save if a checkpoint is due. Call it after every `stepper.step()`.

        Args:
            extra: JSON values to save too, or a function that returns them.

        Returns:
            Whether it saved.
        """
        if self._lag is not None:
            self._warn_of_lag()
        self._extra = extra
        due = self.is_due
        if due:
            self.save(_evaluated(extra))
        return due

    @property
    def is_due(self) -> bool:
        """Whether `step` would save now."""
        steps = self._stepper.steps
        if self._read_only or self._stepper.between_synchronizations:
            return False
        return steps >= self._next if self._every is None else steps % self._every == 0

    def save(
        self, extra: Mapping[str, Any] | None = None, *, best: tuple[str, float] | None = None
    ) -> None:
        """Save now. It returns after the snapshot; the files are written in the background.

        Args:
            extra: JSON values to save too.
            best: (metric, value): mark this checkpoint as the best so far.
        """
        if self._read_only:
            return
        if self._stepper.between_synchronizations:
            raise UsageError("workers-not-together", call="Checkpoints.save()")
        with status.inside("checkpoint"):
            begin = perf_counter()
            self._check_scheduler()
            self.wait()  # also raises the error of an earlier save
            self._stepper.check_replicas(f"before the checkpoint of step {self._stepper.steps}")
            steps = self._stepper.steps
            parts, training = snapshot(self._stepper, self._scheduler)
            replicas = self._stepper.replicas
            witness = self._stepper.witness
            compared = None if replicas is None else replicas.compared
            witnessed = None if witness is None else witness.witnessed
            position = None
            if self._loader is not None:
                position = encoded(self._loader.state_dict(), "the loader's state")
            state = {
                **(extra or {}),
                COMPARED: compared,
                WITNESSED: witnessed,
                "training": training,
                CONFIG: _config_of(self._stepper.model),
                "data": position,
            }
            last_good = compared if witness is None else witnessed
            self._saver.save(
                steps,
                parts,
                state,
                lambda folder: self._tidy(folder, best, last_good),
            )
            self.saved = steps
            if self._every is None:
                self._next = steps + self._agreed_interval(perf_counter() - begin, steps)
            self._stepper.synchronize_before(self._due())

    def _check_scheduler(self) -> None:
        """Raise a UsageError if the optimizer has a scheduler that no checkpoint would hold."""
        known = self._scheduler or self._stepper.scheduler
        if known is None and "initial_lr" in self._stepper.optimizer.param_groups[0]:
            raise UsageError("scheduler-not-saved")

    def _tidy(
        self, folder: Path, best: tuple[str, float] | None, compared: int | None
    ) -> str | None:
        """Delete old checkpoints and copy to `remote`, on rank 0 in the background. It also keeps
        the newest checkpoint that is not after step `compared`. Return the error of a failed copy.
        """
        if self._resumes:
            preemption.leave_mark(preemption.SAVED)
        if best is not None:
            files.mark_best(folder, *best)
        marked = files.best(self.directory)
        remaining = folders.tidy(folder, self._retention, compared, marked)
        size = sum(remaining.values())
        self.stored = folders.Stored(folders.step_of(folder), time(), size)
        if self._remote is not None:
            try:
                self._remote.mirror(folder, remaining, marked, self._retention)
            except LockstepError as error:
                return str(error)
        return None

    def _set_aside(self, compared: int | None) -> str:
        """Set aside the checkpoints after step `compared`, the last step at which the replicas
        or the witness agreed: they may be wrong. Return a sentence for the error message.
        """
        with suppress(LockstepError):
            self._saver.wait()
        since = self._began[1] if compared is None else compared
        if self._stepper.alike.rank == 0:
            folders.set_aside(self.directory, since)
            if self._remote is not None:
                with suppress(LockstepError):
                    self._remote.forget(since)
        return (
            f"Checkpoints after step {since}, the last good comparison, are set aside: the same"
            " command resumes from an earlier one."
        )

    def _agreed_interval(self, blocked: float, steps: int) -> int:
        """Return the steps until the next save, from the duration of a save and of a step on the
        slowest rank. `blocked`: seconds for which this save blocked the training. Collective.
        """
        since, first = self._began
        step = (perf_counter() - since) / max(1, steps - first)
        slowest = torch.tensor([blocked + self._saver.seconds, step], dtype=torch.float64)
        self._world.control.all_reduce(slowest, "max", place="for the time of a checkpoint").wait()
        return steps_until_next(*slowest.tolist())

    @property
    def saving(self) -> bool:
        """Whether this rank is writing a checkpoint now."""
        return self._saver.busy

    def wait(self) -> None:
        """Wait until the last save is on disk."""
        if self._saver.wait() and self._saver.complaint is not None and self._world.rank == 0:
            warnings.warn(
                f"a checkpoint is in {self.directory} only: {self._saver.complaint}",
                LockstepWarning,
                stacklevel=3,
            )

    def close(self) -> None:
        """Save the steps since the last checkpoint, wait for the files, and end. Every rank calls
        it. After an exception it saves nothing.

        Raises:
            LockstepError: the last checkpoint could not be copied to `remote`.
        """
        if (
            self._stepper.steps > self.saved
            and not self._stepper.between_synchronizations
            and sys.exception() is None
        ):
            self.save(_evaluated(self._extra))
        self._extra = None  # it may reference the whole training
        with status.inside("checkpoint"):
            self._saver.wait()
        self._saver.close()
        if self._saver.complaint is not None:
            raise LockstepError(
                "checkpoint-not-copied",
                directory=str(self.directory),
                complaint=self._saver.complaint,
            )


def _config_of(model: nn.Module) -> dict[str, Any] | None:
    """Return what `save_pretrained` of transformers would write into config.json; None if `model`
    is not one of its models.
    """
    kinds = {f"{kind.__module__}.{kind.__qualname__}" for kind in type(model).__mro__}
    if "transformers.modeling_utils.PreTrainedModel" not in kinds:
        return None
    config: Any = model.config
    name = type(model).__name__.removeprefix("FSDP")  # of the classes that fully_shard makes
    return {**json.loads(config.to_json_string()), "architectures": [name]}


def _evaluated(extra: Extra) -> Mapping[str, Any] | None:
    return extra() if callable(extra) else extra


def _remote(url: str) -> Remote:
    from lockstep.checkpoints.remote import Remote  # imports fsspec, which few trainings need

    return Remote(url)
