"""`lockstep.train`: the loop that every task goes through, on one rank or many.

The loop is the one that a user would write with Loader and Stepper (README); around it stand evaluation, records and checkpoints.
"""

from __future__ import annotations

import json
import os
import shlex
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from torch import Tensor

from lockstep import randomness
from lockstep.anatomy import timeline
from lockstep.anatomy.read import read
from lockstep.checkpointing import Checkpoints
from lockstep.checkpoints.files import Checkpoint
from lockstep.checkpoints.folders import folder_of
from lockstep.checkpoints.identity import check_storable, sha256, weights
from lockstep.data.loader import is_iterable
from lockstep.data.windows import Window
from lockstep.errors import LockstepError, LockstepWarning, Preempted, TaskError, UsageError
from lockstep.gradients.layout import BUCKET
from lockstep.inference.evaluate import Evaluation
from lockstep.method import Reduce
from lockstep.model_parallel.training import digest_of, mesh_in_words, part_of, say_mesh
from lockstep.settings import METHOD, SCHEDULE, SPLITS, Device, Settings
from lockstep.step_result import StepResult
from lockstep.stepper import Stepper
from lockstep.task import Precision, Task
from lockstep.training.alike import compare_tasks
from lockstep.training.anatomy import AnatomyFile, begins
from lockstep.training.build import Length, loader_of, model_of, optimizer_of, scheduler_of
from lockstep.training.forward import Forward, grad_scaler, matmul_precision
from lockstep.training.journal import Journal
from lockstep.training.memory_use import Activations
from lockstep.training.metrics import finite
from lockstep.training.opening import computing, run_directory_for, world_for
from lockstep.training.result import Result
from lockstep.training.resume import changed_since, check_same, forget_after, machine, moved, recipe_of
from lockstep.training.run_directory import RunDirectory
from lockstep.training.state import TrainingState
from lockstep.training.task_digest import task_digests
from lockstep.world import World

_WITHOUT_END = 2**62  # epochs


def train(
    task: Task,
    *,
    epochs: int | None = None,
    steps: int | None = None,
    run: Path | str | RunDirectory | None = None,
    device: Device = "auto",
    precision: Precision | None = None,
    compile: bool | None = None,
    reduce: Reduce = "auto",
    update: str = "replicated",
    exact: bool = False,
    compress: str | None = None,
    staleness: int | str | None = None,
    sync_every: int | None = None,
    outer: str | None = None,
    balance: str | None = None,
    mesh: str | None = None,
    schedule: str = SCHEDULE,
    split: str = SPLITS[0],
    bucket_mb: float = 25,
    threads: int | None = None,
    checkpoint_every: int | None = None,
    checkpoints: str | None = None,
    loader_workers: int = 0,
    allow_changes: bool = False,
    world: World | None = None,
) -> Result:
    """Train a task: all ranks of the open world call this, or it opens a world of its own and closes it again.

    Args:
        task: what is trained.
        epochs, steps: when to end; default: the task's epochs. `steps` (optimizer steps) may end inside an epoch.
        run: a folder for settings, metrics, checkpoints and result; None writes nothing.
        device, precision, compile: None or "auto" follows the hardware and the task.
        reduce, update, bucket_mb: how gradients are summed, who applies them, and how many MiB of them travel together.
        exact: the same bits come out at any number of workers.
        compress: in how many bits gradients travel: bf16, fp16, int8, powersgd:RANK, topk:SHARE.
        staleness: with update="server", the steps that a rank may be ahead of the slowest, or "inf".
        sync_every, outer: steps that every rank takes alone between two meetings, and what these do: average, nesterov.
        balance: for ranks of different speed, "auto" or a number for each rank, such as "2,1,1": who computes how many of a step's micro-batches.
        mesh: how many ranks there are along data, shard, pipeline and tensor, such as "data=2,pipeline=2"; default: data alone.
        schedule, split: of a pipeline, the order in which it runs micro-batches, and in what its stages are equal: "time" or "parameters".
        threads: intra-op threads of each rank while it trains; None: the cores of the host shared among its ranks.
        checkpoint_every: steps from one checkpoint to the next; None: as often as costs less than 2 % of the time.
        checkpoints: a URL that fsspec knows (s3://bucket/run): every checkpoint is copied there, and a run directory without one goes on from it.
        loader_workers: processes of each rank that load data. `lockstep tune` finds out which of these are fastest here.
        world: default: the open one, else one that is opened here.
        allow_changes: resume an exact run although the task's code or samples have changed since its checkpoint. Without `exact` that is a warning.

    A run directory with a run that did not come to its end is gone on with, from its newest whole checkpoint.
    It evaluates on eval_data after every epoch and where the training ends. Rank 0 shows progress on stderr.

    Returns:
        The result, with the trained model, on every rank; on a mesh that splits it, with this rank's part.

    Raises:
        UsageError: values that cannot work, or a run directory that is in use, not writable, or holds a run already.
        TaskError: one of the task's functions returned something that cannot be used.
        Preempted: SIGTERM or SIGUSR1 came to a rank. All have stopped after the same step, and saved, if there is a run directory.
    """
    if not isinstance(task, Task):
        raise TaskError(f"train() was given a {type(task).__name__}; it takes a lockstep.Task")
    with world_for(world, device) as found:
        settings = Settings(
            task=task.name or "task",
            workers=found.size,
            epochs=epochs,
            steps=steps,
            device=device,
            precision=precision,
            compile=compile,
            reduce=reduce,
            update=update,
            exact=exact,
            compress=compress,
            staleness=staleness,
            sync_every=sync_every,
            outer=outer,
            balance=balance,
            mesh=mesh,
            schedule=schedule,
            split=split,
            bucket_mb=bucket_mb,
            threads=threads,
            checkpoint_every=checkpoint_every,
            checkpoints=checkpoints,
            loader_workers=loader_workers,
            allow_changes=allow_changes,
        )
        with run_directory_for(run, settings, found) as directory, computing(settings, found):
            return Training(task, settings, found, directory).run()


def train_as(task: Task, settings: Settings, run: RunDirectory) -> Result | None:
    """`train` on a rank whose launcher has made the settings and claimed the run directory. It opens the world.

    None where it ended at a checkpoint, to be gone on with by more workers.
    """
    with world_for(None, settings.device) as world, computing(settings, world):
        try:
            return Training(task, settings, world, run).run()
        except _Grow:
            if world.rank == 0:
                run.grow.touch()
            return None


class _Grow(Exception):
    """Raised on all ranks in the same step, after a checkpoint."""


class Training:
    """One training, being done. Intra-op threads, which belong to the process and not to it, are its caller's affair."""

    def __init__(self, task: Task, settings: Settings, world: World, run: RunDirectory | None) -> None:
        self.task, self.settings, self.world, self.directory = task, settings, world, run
        self.size = world.size
        grid = settings.grid
        share = None if grid is None else (grid.share(world.rank), grid.replicas)
        self.loader = loader_of(task, world, settings.loader_workers, share, settings.balance)
        self.length = Length.of(task, settings, None if is_iterable(task.train_data) else len(self.loader))
        self.precision: Precision = settings.precision or task.precision
        randomness.shared(task.seed)
        self.model = model_of(task)
        check_storable(self.model)  # what cannot be stored is found before the training, not after it
        self.forward = Forward(self.model, task, self.precision, world.device)
        self.part = part_of(task, self.forward, settings, world)
        self.model = self.model.to(world.device) if self.part is None else self.part.runs
        self.forward.model = self.model if self.part is None else self.part.modes
        compiles = self.part is None and bool(task.compile if settings.compile is None else settings.compile)
        self.activations = Activations(counts=not compiles)
        if compiles:
            self.model.compile()  # in place: the weights keep their names
        self.optimizer = optimizer_of(task, self.model)
        recipe = recipe_of(task, settings, self.optimizer)  # before a scheduler touches it
        self.scheduler = scheduler_of(task, self.optimizer, self.length)
        if self.part is not None:
            self.part.adopt(self.optimizer)
        self.stepper = Stepper(
            self.model if self.part is None else self.part.module,
            self.optimizer,
            clip=task.clip,
            scaler=grad_scaler(self.precision, world.device),
            scheduler=self.scheduler if task.scheduler_per == "step" else None,
            seed=task.seed,
            unused=task.unused,
            **{name: getattr(settings, name) for name in METHOD},
            bucket_mb=settings.bucket_mb,
            held=self.part,
            world=world,
        )
        self.stepper.draws(self.loader)
        if self.length.steps is not None:
            self.stepper.meet_before(self.length.steps)
        self.evaluation: Evaluation | None = None
        if task.eval_data is not None:
            self.evaluation = Evaluation(task, self.forward, world, loader_workers=settings.loader_workers, split=self.part)
        self.recipe, self.machine = recipe, machine()
        self.digests = task_digests(task) if run is not None else {}
        compare_tasks(world.control, self.digests)
        self.changed = ""
        self.checkpoints: Checkpoints | None = None
        if run is not None:
            every, remote = settings.checkpoint_every, settings.checkpoints
            self.checkpoints = Checkpoints(run.checkpoints, self.stepper, self.loader, every=every, remote=remote, guard=run.check)
        elif settings.checkpoints is not None:
            raise UsageError(f"checkpoints={settings.checkpoints!r} are copies of a run's: give run= too")
        self.reached = TrainingState.of(task)
        self.anatomy: AnatomyFile | None = None

    def _how(self) -> str:
        settings, buckets = self.settings, ""
        if settings.bucket_mb != BUCKET / 2**20:
            buckets = f" in buckets of {settings.bucket_mb:g} MiB"
        method = self.stepper.method
        what = "meetings" if method.local is not None else "gradients"
        replicas = self.world.size if self.part is None else self.part.data.size
        silent = method.server is not None or (replicas == 1 and method.compress is None)
        reduction = "" if silent else f"{what} by {self.stepper.reducer.reduction.name}{buckets}, "
        more = [] if settings.threads is None else [f"{settings.threads} thread{'s' * (settings.threads > 1)} a rank"]
        more += [f"{settings.loader_workers} loader worker{'s' * (settings.loader_workers > 1)} a rank"] if settings.loader_workers else []
        return ", ".join([f"{reduction}{method.describe()}{'' if method.alone else ' update'}", *more])

    def run(self) -> Result:
        lengths = {"steps": self.length.steps, "epochs": self.length.epochs}
        skips = self.precision == "fp16"  # without a loss scale the Stepper warns
        self.world.heed_signals()
        resumed = self._resume()
        with (
            Journal(
                self.task,
                self.world,
                self.directory,
                steps=self.length.steps,
                epochs=self.length.epochs,
                says_skips=skips,
                sent=lambda: self.stepper.bytes_sent,
            ) as journal,
            matmul_precision(self.precision),
            self._anatomy(),
        ):
            came_from = {} if self.settings.settings_file is None else {"settings_file": self.settings.settings_file}
            journal.event(
                "start",
                f"{self.loader.describe('rank' if self.part is None else 'replica')}; {self._how()}",
                workers=self.world.size,
                **lengths,
                **came_from,
            )
            if self.settings.mesh is not None:
                say_mesh(self.settings, self.part, self.world, self.directory, journal)
            if not self.stepper.method.world_size_free:
                journal.event("method", "the number of workers is part of what is trained: another one gives other weights")
            if self.settings.exact:
                journal.event(
                    "exact", f"exact: sums along one tree over the micro-batches of a step; {self.world.compute_deterministically()}"
                )
            began = time.perf_counter()
            if resumed is not None:
                self._say_resumed(journal, resumed)
            self._epochs(journal)
            self.stepper.check_replicas(f"at the end, after step {self.stepper.steps}")
            self._check_applied()
            seconds = time.perf_counter() - began
            if self.reached.stopped_early:
                journal.event("early stop", f"stopped early: {self.reached.stopped_early}", step=self.stepper.steps)
            if self.part is not None and (idle := self.part.idle()) is not None:
                journal.event("idle", idle)
            journal.event("end", step=self.stepper.steps, seconds=seconds)
            digest = sha256(weights(self.model)) if self.part is None else digest_of(self.part)
            checkpoint = self._save_last(digest)
        self._write_timeline()
        return self._result(seconds, digest, checkpoint)

    @contextmanager
    def _anatomy(self) -> Iterator[None]:
        """Record where the time of steps goes, on every rank, where there is a folder for it."""
        if self.directory is None:
            yield
            return
        with AnatomyFile(self.directory.path, self.stepper, begins(self.stepper, self.task, self.settings)) as self.anatomy:
            try:
                yield
            except (Preempted, _Grow):
                self.anatomy.end(self.stepper.steps)
                raise
            self.anatomy.end(self.stepper.steps)

    def _write_timeline(self) -> None:
        """Of what the ranks have left, for Perfetto. A run is none the worse without."""
        if self.directory is None:
            return
        self.directory.check()
        self.world.barrier()  # their files are closed
        if self.world.rank > 0:
            return
        anatomy = read(self.directory.path)
        if anatomy is not None:
            try:
                timeline.write(self.directory.path, anatomy)
            except OSError as error:
                file = self.directory.path / timeline.FILE
                warnings.warn(f"{file} cannot be written ({error.strerror}) and is left out", LockstepWarning, stacklevel=2)

    def _resume(self) -> Checkpoint | None:
        """Go on from the newest whole checkpoint of the run directory, if it has one."""
        if self.checkpoints is None or self.directory is None:
            return None
        found = self.checkpoints.resume(check=self._check)
        if found is not None:
            self.reached.load(found.state)
        if self.world.rank == 0:
            forget_after(self.directory.metrics, self.stepper.steps, self.reached.evaluated)
        return found

    def _check(self, found: Checkpoint) -> None:
        check_same(self.recipe, found.state.get("recipe", {}), found.folder)
        refuse = self.settings.exact and not self.settings.allow_changes
        self.changed = changed_since(found.state, self.digests, found.folder, self.world, refuse=refuse)

    def _say_resumed(self, journal: Journal, found: Checkpoint) -> None:
        of = "" if self.length.steps is None else f" of {self.length.steps}"
        journal.event("resumed", f"resumed from step {found.step}{of}", step=found.step, workers=self.world.size)
        if self.changed:
            line = f"warning: the task has changed since step {found.step} was saved: {self.changed}"
            journal.event("changed", line, step=found.step, changes=self.changed)
        if self.settings.exact and (difference := moved(found.state["machine"], self.machine)):
            journal.event("moved", f"the bits may differ from those of a run that stayed where it was: {difference}", step=found.step)

    def _epochs(self, journal: Journal) -> None:
        at = self.loader.state_dict()
        if self.reached.unevaluated is not None:
            self._evaluate(journal, self.reached.unevaluated)
        elif at["epoch"] > self.reached.epochs:  # resumed from a checkpoint that was taken before its epoch's end was seen to
            self._end_of_epoch(journal, at["epoch"], whole=True)
        elif self._over() and self.reached.evaluated != self.stepper.steps:
            self._end_of_epoch(journal, at["epoch"] + 1, whole=False)
        if self._over():
            return
        for epoch in self.loader.epochs(self.length.epochs or _WITHOUT_END):
            whole = True
            for window in epoch:
                self._step(window, journal)
                if self.stepper.steps == self.length.steps:
                    whole = hasattr(epoch, "__len__") and self.stepper.steps % len(epoch) == 0
                    break
            self._end_of_epoch(journal, epoch.number + 1, whole=whole)
            if self._over():
                break

    def _check_applied(self) -> None:
        steps = self.stepper.steps
        if not self.world.agree(steps == 0 or self.reached.applied + self.stepper.applied > 0):
            raise LockstepError(
                f"none of the {steps} steps was applied, so nothing was trained: the weights are those of the start. "
                "The warning of the first skipped step says why"
            )

    def _over(self) -> bool:
        return self.reached.stopped_early is not None or self.stepper.steps == self.length.steps

    def _end_of_epoch(self, journal: Journal, epoch: int, *, whole: bool) -> None:
        self.reached.epochs += whole
        if self.task.scheduler_per == "epoch" and self.scheduler is not None:
            self.scheduler.step()
        self._evaluate(journal, epoch)

    def _step(self, window: Window, journal: Journal) -> None:
        if window.moved is not None:
            moved = window.moved
            journal.event("balance", str(moved), step=window.step + 1, micro_batches_by_rank=moved.by_rank, seconds_by_rank=moved.seconds)
        lr = float(self.optimizer.param_groups[0]["lr"])
        result = self.step(window)
        self.reached.loss = result.loss
        if self.anatomy is not None:
            self.anatomy.step(result, window, self.activations.bytes)
        if self.stepper.method.server is None:
            journal.step(window, lr, result)
        else:
            journal.applied(result)
            self._regroup(journal)
        if result.stop and self.stepper.steps != self.length.steps:  # at the end it is over anyway, but for the evaluation
            self._stop(journal)
        if (
            self.checkpoints is not None
            and self.checkpoints.step(self._state)
            and self.stepper.steps != self.length.steps
            and self._shall_grow()
        ):
            self.checkpoints.close()
            raise _Grow

    def _regroup(self, journal: Journal) -> None:
        """Where ranks have died that can be done without, the rest go on, from a meeting on."""
        if self.world.size == self.size:
            return
        journal.event(
            "gone on",
            f"{self.size - self.world.size} of {self.size} ranks died: the rest go on without",
            step=self.stepper.steps,
            workers=self.world.size,
        )
        self.size = self.world.size
        if self.evaluation is not None:
            self.evaluation = Evaluation(self.task, self.forward, self.world, loader_workers=self.settings.loader_workers)
        if self.checkpoints is not None:
            self.checkpoints.regroup()

    def _stop(self, journal: Journal) -> NoReturn:
        """All ranks were asked to stop, and are here."""
        steps, saved = self.stepper.steps, self.checkpoints is not None
        if self.checkpoints is not None:
            self.checkpoints.save(self._state())
            self.checkpoints.close()
        of = "" if self.length.steps is None else f" of {self.length.steps}"
        then = "nothing is saved: there is no run directory"
        if saved and self.directory is not None:
            then = f"saved: the same command with --run {shlex.quote(_from_here(self.directory.path))} goes on"
        journal.event("preempted", f"stopped as asked after step {steps}{of}, {then}", step=steps)
        raise Preempted(steps, saved)

    def _shall_grow(self) -> bool:
        """The same on all ranks."""
        if not self.settings.grow_if_wanted:
            return self.settings.grow
        return self.world.agree(self.world.rank == 0 and self.directory is not None and self.directory.wanted.exists())

    def step(self, window: Window) -> StepResult:
        """One optimizer step, of which nothing is recorded."""
        if self.part is not None:
            self.part.walk(self.stepper, window, self.forward)
            return self.stepper.step()
        for batch in self.stepper.micro_batches(window):
            loss, weight = self.activations.watch(self.model, partial(self._loss, batch))
            self.stepper.backward(loss, weight)
        return self.stepper.step()

    def _loss(self, batch: Any) -> tuple[Tensor, float | Tensor]:
        return self.forward.loss(self.forward(batch), batch)

    def _evaluate(self, journal: Journal, epoch: int) -> None:
        self.stepper.meet()  # an evaluation, and a result, are of one model
        self.stepper.check_replicas(f"before the evaluation after step {self.stepper.steps}")
        if self.evaluation is None:
            return
        began = time.perf_counter()
        self.reached.unevaluated = epoch
        metrics = self.evaluation()
        if metrics is None:
            self._stop(journal)
        steps = self.stepper.steps
        improved = self.reached.note(metrics, steps)
        if improved and self.reached.best is not None and self.checkpoints is not None:
            self.checkpoints.save(self._state(), best=(self.reached.best.metric, self.reached.best.value))
        journal.evaluated(steps, epoch, metrics, time.perf_counter() - began)

    def _state(self) -> dict[str, Any]:
        """What a checkpoint says beside the Stepper's and the Loader's state."""
        state = {
            "task": self.task.name,
            "seed": self.task.seed,
            **self.reached.as_json(),
            "applied": self.reached.applied + self.stepper.applied,
            "recipe": self.recipe,
            "machine": self.machine,
            "digests": self.digests,
        }
        found: dict[str, Any] = finite(state)
        return found

    def _save_last(self, digest: str) -> Path | None:
        """The checkpoint of the training's end, on disk."""
        if self.checkpoints is None:
            return None
        self.checkpoints.save({**self._state(), "sha256": digest})
        self.checkpoints.close()
        return folder_of(self.checkpoints.directory, self.stepper.steps)

    def _result(self, seconds: float, digest: str, checkpoint: Path | None) -> Result:
        result = Result(
            task=self.task.name or "task",
            model=self.model,
            metrics=self.reached.metrics,
            best=self.reached.best.as_json() if self.reached.best else None,
            loss=self.reached.loss,
            headline=self.reached.headline(),
            epochs=self.reached.epochs,
            steps=self.stepper.steps,
            workers=self.world.size,
            update=", ".join(filter(None, [mesh_in_words(self.settings), self.stepper.method.describe()])),
            reduce=self.stepper.reducer.reduction.name,
            seconds=seconds,
            stopped_early=self.reached.stopped_early,
            sha256=digest,
            run=self.directory.path if self.directory else None,
            checkpoint=checkpoint,
        )
        if self.directory is not None and self.world.rank == 0:
            self.directory.check()
            new = self.directory.result.with_suffix(".unfinished")
            new.write_text(json.dumps(finite(result.as_json()), indent=1) + "\n", encoding="utf-8")
            new.replace(self.directory.result)  # whether it is there says whether the run has ended
        return result


def _from_here(path: Path) -> str:
    """As short as it can be said here."""
    relative = os.path.relpath(path)
    return str(path.absolute()) if relative.startswith("..") else relative
