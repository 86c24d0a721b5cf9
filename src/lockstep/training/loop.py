"""The training loop. It is the loop that a user would write with Loader and Stepper (README), with
evaluation, records and checkpoints around it.
"""

from __future__ import annotations

import time
from typing import NoReturn

from lockstep.checks.identity import sha256, weights
from lockstep.config.settings import Settings
from lockstep.config.task import Task
from lockstep.data.windows import ENDLESS, Window
from lockstep.errors import LockstepError, Preempted
from lockstep.training.anatomy import AnatomyFile, begins, starts
from lockstep.training.assembled import AssembledTraining
from lockstep.training.journal import Journal, mesh_in_words, record_resumed, record_start
from lockstep.training.loggers import LoggedRun, Loggers, hyper_parameters
from lockstep.training.metrics import LEFT_OUT
from lockstep.training.opening import matmul_precision
from lockstep.training.progress import ProgressFacts
from lockstep.training.result import Result
from lockstep.training.run_directory import RunDirectory
from lockstep.training.saving import NoStepTimes
from lockstep.world.world import World


class Training(AssembledTraining):
    """A training that runs from its current state to its end."""

    def __init__(
        self, task: Task, settings: Settings, world: World, run: RunDirectory | None
    ) -> None:
        super().__init__(task, settings, world, run)
        self._times: AnatomyFile | NoStepTimes = NoStepTimes()

    def run(self) -> Result:
        self.world.heed_signals()
        changed, resumed = self.resume()
        begin = begins(
            self.stepper,
            micro_batch=self.task.micro_batch,
            global_batch=self.task.global_batch,
            loader_workers=self.settings.loader_workers,
        )
        with (
            self._journal() as journal,
            matmul_precision(self.precision),
            self.saving.step_times(begin) as self._times,
        ):
            record_start(self, journal)
            began = time.perf_counter()
            if resumed is not None:
                record_resumed(self, journal, resumed, changed)
            self._epochs(journal)
            self._check_trained()
            seconds = time.perf_counter() - began
            if self.progress.stopped_early:
                line = f"stopped early: {self.progress.stopped_early}"
                journal.event("early stop", line, step=self.stepper.steps)
            journal.event("end", step=self.stepper.steps, seconds=seconds)
            result = self._result(seconds)
            journal.finished(result)
        self.saving.finish(result)
        return result

    def _journal(self) -> Journal:
        loggers = None
        previous_starts = 0
        if self.world.rank == 0 and self.directory is not None:
            identity = self.identity
            run = LoggedRun(
                path=self.directory.path,
                records=self.directory.metrics,
                task=self.task.name or "task",
                step=self.stepper.steps,
                parameters=hyper_parameters(self.settings, identity.recipe, identity.machine),
            )
            loggers = Loggers(self.settings.log, run)
            previous_starts = starts(self.directory.path)
        try:
            return Journal(
                self.task,
                self.world,
                self.directory,
                epochs=self.length.epochs,
                says_skips=self.precision == "fp16",  # without a loss scale the Stepper warns
                sent=lambda: self.stepper.bytes_sent,
                loggers=loggers,
                facts=ProgressFacts(
                    self.length.steps,
                    self.length.epochs,
                    starts=previous_starts,
                    stored=lambda: self.saving.stored,
                ),
            )
        except BaseException:
            if loggers is not None:
                loggers.close("FAILED")
            raise

    def _epochs(self, journal: Journal) -> None:
        at = self.loader.state_dict()
        if self.progress.unevaluated is not None:
            self._evaluate(journal, self.progress.unevaluated)
        elif at["epoch"] > self.progress.epochs:
            # resumed from a checkpoint that was saved before the end of its epoch was handled
            self._end_of_epoch(journal, at["epoch"], complete=True)
        elif self._over() and self.progress.evaluated != self.stepper.steps:
            self._end_of_epoch(journal, at["epoch"] + 1, complete=False)
        if self._over():
            return
        for epoch in self.loader.epochs(self.length.epochs or ENDLESS):
            complete = True
            for window in epoch:
                self._step(window, journal)
                if self._at_last_step():
                    complete = hasattr(epoch, "__len__") and self.stepper.steps % len(epoch) == 0
                    break
            self._end_of_epoch(journal, epoch.number + 1, complete=complete)
            if self._over():
                break

    def _over(self) -> bool:
        return self.progress.stopped_early is not None or self._at_last_step()

    def _at_last_step(self) -> bool:
        return self.stepper.steps == self.length.steps

    def _end_of_epoch(self, journal: Journal, epoch: int, *, complete: bool) -> None:
        if complete:
            self.progress.epochs += 1
            self.average.after_epoch(self.progress.epochs)
        if self.task.scheduler_per == "epoch" and self.scheduler is not None:
            self.scheduler.step()
        self._evaluate(journal, epoch)

    def _step(self, window: Window, journal: Journal) -> None:
        left_out = self.loader.left_out
        if left_out.ranges and window.step + 1 in left_out:
            self.stepper.leave_out()
            journal.event(LEFT_OUT, step=self.stepper.steps, epoch=window.epoch + 1)
            self.saving.after_step(self.state, last=self._at_last_step())
            return
        lr = float(self.optimizer.param_groups[0]["lr"])
        result = self.step(window)
        self.progress.loss = result.loss
        self._times.step(result, window)
        if self.stepper.method.server:
            journal.applied(result)
        else:
            journal.step(window, lr, result)
        if result.stop and not self._at_last_step():
            # after the last step only the evaluation is left
            self._stop(journal)
        self.saving.after_step(self.state, last=self._at_last_step())

    def _stop(self, journal: Journal) -> NoReturn:
        """A rank was asked to stop: save and raise Preempted. All ranks call it."""
        steps = self.stepper.steps
        command = self.saving.stop(self.state)
        outcome = "nothing is saved: there is no run directory"
        if command:
            outcome = f"saved: resume with {command}"
        line = f"stopped after step {steps}{self.length.of_steps}, {outcome}"
        journal.event("preempted", line, step=steps)
        raise Preempted(steps, command is not None)

    def _evaluate(self, journal: Journal, epoch: int) -> None:
        self.stepper.synchronize()  # an evaluation or a result needs equal replicas
        steps = self.stepper.steps
        self.stepper.check_replicas(f"before the evaluation after step {steps}")
        if self.evaluation is None:
            return
        began = time.perf_counter()
        journal.evaluating()
        self.progress.unevaluated = epoch
        with self.average.evaluated(self.forward):
            metrics = self.evaluation()
        if metrics is None:
            self._stop(journal)
        improved = self.progress.record(metrics, steps)
        if improved is not None:
            self.saving.best(self.state, improved.metric, improved.value)
        journal.evaluated(steps, epoch, metrics, time.perf_counter() - began)

    def _check_trained(self) -> None:
        steps = self.stepper.steps
        self.stepper.check_replicas(f"at the end, after step {steps}")
        if not self.world.agree(steps == 0 or self.progress.applied + self.stepper.applied > 0):
            raise LockstepError("no-step-applied", steps=steps)

    def _result(self, seconds: float) -> Result:
        """Save the last checkpoint of the finished training, and return its result."""
        digest = self.model_shard.digest()
        progress = self.progress
        average = self.average.current
        return Result(
            task=self.task.name or "task",
            model=self.model,
            average=average,
            average_sha256=None if average is None else sha256(weights(average)),
            metrics=progress.metrics,
            best=progress.best.as_json() if progress.best else None,
            loss=progress.loss,
            headline=progress.headline(),
            epochs=progress.epochs,
            steps=self.stepper.steps,
            workers=self.world.size,
            update=", ".join(filter(None, [mesh_in_words(self), self.stepper.method.describe()])),
            reduce=self.stepper.reducer.reduction.name,
            seconds=seconds,
            stopped_early=progress.stopped_early,
            sha256=digest,
            run=self.saving.path,
            checkpoint=self.saving.end({**self.state(), "sha256": digest}),
        )
