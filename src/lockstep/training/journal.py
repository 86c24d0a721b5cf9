"""Write a training's records: to metrics.jsonl, loggers and the screen on rank 0, and to the task's
callbacks on the ranks that asked for them. Also record how it trains, what each rank holds, and
from which step it resumes.

The training loop reports events and knows none of these targets. The screen is stderr
(progress.py); stdout of `lockstep train` has only its last line.
"""

from __future__ import annotations

import json
import platform
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import lockstep
from lockstep.checkpoints.files import Checkpoint
from lockstep.collectives.broadcast_json import everybodys
from lockstep.config.task import Record, Task
from lockstep.data.windows import Window
from lockstep.errors import Preempted
from lockstep.gradients.layout import BUCKET
from lockstep.runtime.step_clock import StepTimes
from lockstep.step.step_result import StepResult
from lockstep.training.loggers import Ended, Loggers
from lockstep.training.metrics import MetricsFile
from lockstep.training.progress import Facts, Progress, of, progress
from lockstep.training.result import Result
from lockstep.training.resume import differences
from lockstep.training.run_directory import RunDirectory
from lockstep.training.saving import MoreWorkers
from lockstep.updates.update import AppliedWindow
from lockstep.world.world import World

if TYPE_CHECKING:
    from lockstep.training.assembled import AssembledTraining


MESH = "mesh.json"


class Journal:
    """The records of one training that is planned for `epochs` epochs.

    `says_skips`: print skipped steps, because nothing else reports them. `sent`: returns the bytes
    sent so far. `loggers`: for rank 0. `facts`: what rank 0 shows; None: show nothing.
    """

    def __init__(
        self,
        task: Task,
        world: World,
        run: RunDirectory | None,
        *,
        epochs: int | None,
        says_skips: bool,
        sent: Callable[[], int],
        loggers: Loggers | None = None,
        facts: Facts | None = None,
    ) -> None:
        self._epochs, self._says_skips, self._bytes_sent = epochs, says_skips, sent
        self._open = ExitStack()
        self._file: MetricsFile | None = None
        self._run, self._loggers = run, loggers
        self._result: Result | None = None
        self._screen: Progress | None = None
        if world.rank == 0:
            self._file = (
                self._open.enter_context(MetricsFile(run.metrics)) if run is not None else None
            )
            if facts is not None:
                self._screen = progress(facts)
                self._open.callback(self._screen.close)
                if run is not None:
                    self._say(f"run directory: {run.shown}")
        calls = world.rank == 0 or task.callbacks_on == "all"
        self._on_step = task.on_step if calls else None
        self._on_evaluate = task.on_evaluate if calls else None
        self._last: Mapping[str, Any] | None = None
        self._times: Sequence[StepTimes] = ()  # that the screen has not shown yet
        self._clock, self._sent = time.perf_counter(), sent()

    def event(self, event: str, line: str | None = None, **facts: Any) -> None:
        """Record an event; print `line` if it is given."""
        self._write({"kind": "event", "event": event, **({"line": line} if line else {}), **facts})
        if line:
            self._say(line)

    def step(self, window: Window, lr: float, result: StepResult) -> None:
        """Record one optimizer step, taken with learning rate `lr`."""
        # the norm is known only if `clip` is set
        told = {"lr": lr, **({} if result.norm is None else {"grad_norm": result.norm})}
        skipped = None if result.applied else result.reason
        self._times = result.times
        self._step(
            window, result, told, at=time.perf_counter(), sent=result.bytes_sent, skipped=skipped
        )

    def applied(self, result: StepResult) -> None:
        """Record the windows that a parameter server has applied since the last call. Only rank 0
        has them.
        """
        self._times = result.times
        for each in result.windows:
            told = {"gradient_age": each.age, "lr": each.lr}
            self._step(
                each, each, told, at=each.at, sent=result.bytes_sent, skipped=each.reason or None
            )

    def _step(
        self,
        window: Window | AppliedWindow,
        found: StepResult | AppliedWindow,
        told: Mapping[str, float],
        *,
        at: float,
        sent: int,
        skipped: str | None,
    ) -> None:
        record = {
            "kind": "step",
            "step": window.step + 1,
            "epoch": window.epoch + 1,
            "loss": found.loss,
            "weight": found.weight,
            "samples_by_rank": list(found.samples_by_rank),
            **told,
            "samples_per_s": sum(found.samples_by_rank) / max(at - self._clock, 1e-9),
            "bytes_sent": sent - self._sent,
        }
        self._clock, self._sent, self._last = at, sent, record
        self._write(record)
        if self._screen is not None:
            self._screen.step(record, self._times)
            self._times = ()
        if skipped is not None:
            line = f"step {record['step']} was skipped: {skipped}" if self._says_skips else None
            self.event("step skipped", line, step=record["step"], reason=skipped)
        _call(self._on_step, record)

    def evaluating(self) -> None:
        """Show that an evaluation begins."""
        if self._screen is not None:
            self._screen.begin("evaluating")

    def evaluated(
        self, step: int, epoch: int, metrics: Mapping[str, float], seconds: float
    ) -> None:
        """Record an evaluation after `step` steps, in or at the end of `epoch`; both from 1."""
        record = {
            "kind": "evaluate",
            "step": step,
            "epoch": epoch,
            "metrics": dict(metrics),
            "seconds": seconds,
        }
        self._write(record)
        shown = ", ".join(f"{name} {value:.4f}" for name, value in metrics.items())
        trained = f", training loss {self._last['loss']:.4f}" if self._last else ""
        self._say(f"epoch {of(epoch, self._epochs)}, step {step}: {shown}{trained}")
        _call(self._on_evaluate, record)
        self._start_watch()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._open:
            if self._loggers is not None:
                stopped = kind in (Preempted, MoreWorkers, KeyboardInterrupt)
                ended: Ended = "KILLED" if stopped else "FINISHED" if self._result else "FAILED"
                self._loggers.close(ended, self._result)
                self._say_problems(self._loggers)

    def finished(self, result: Result) -> None:
        """Keep the result; loggers get it when they are closed."""
        self._result = result

    def _start_watch(self) -> None:
        """Count time and bytes from here on for the next step."""
        self._clock, self._sent = time.perf_counter(), self._bytes_sent()

    def _write(self, record: Record) -> None:
        if self._file is not None and self._run is not None:
            self._run.check()
            self._file.write(record)
        if self._loggers is not None:
            self._loggers.add(record)
            self._say_problems(self._loggers)

    def _say_problems(self, loggers: Loggers) -> None:
        while loggers.problems:
            self.event("logger failed", loggers.problems.pop(0))

    def _say(self, line: str) -> None:
        if self._screen is not None:
            self._screen.say(line)


def _call(callback: Callable[[Record], None] | None, record: Record) -> None:
    if callback is not None:
        callback(record)


def say_start(training: AssembledTraining, journal: Journal) -> None:
    """Record how the training starts. Every rank calls it."""
    settings, world, method = training.settings, training.world, training.stepper.method
    line = f"{training.loader.describe(training.placed.holder)}; {_how(training)}"
    journal.event(
        "start",
        line,
        workers=world.size,
        steps=training.length.steps,
        epochs=training.length.epochs,
        at=datetime.now(UTC).isoformat(timespec="seconds"),
        seed=training.task.seed,
        machine=training.identity.machine,
        versions={"lockstep": lockstep.__version__, "python": platform.python_version()},
    )
    if settings.mesh is not None:
        _say_mesh(training, journal)
    if not method.world_size_free:
        journal.event(
            "method",
            "with this method another number of workers gives other weights",
        )
    if settings.exact:
        journal.event(
            "exact",
            "exact: gradients are added along one tree over the micro-batches of a step;"
            f" {world.compute_deterministically()}",
        )


def _how(training: AssembledTraining) -> str:
    settings, method = training.settings, training.stepper.method
    buckets = (
        "" if settings.bucket_mb == BUCKET / 2**20 else f" in buckets of {settings.bucket_mb:g} MiB"
    )
    what = "synchronizations" if method.local is not None else "gradients"
    replicas = training.placed.replicas(training.world.group).size
    silent = method.server or (replicas == 1 and method.compress is None)
    reduction = "" if silent else f"{what} by {training.stepper.reducer.reduction.name}{buckets}, "
    threads = [] if settings.threads is None else [_a_rank(settings.threads, "thread")]
    workers = [_a_rank(settings.loader_workers, "loader worker")] if settings.loader_workers else []
    return ", ".join(
        [f"{reduction}{method.describe()}{'' if method.alone else ' update'}", *threads, *workers]
    )


def _a_rank(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count > 1)} a rank"


def mesh_in_words(training: AssembledTraining) -> str:
    """Return the mesh and its schedule, for the last line."""
    grid = training.settings.mesh
    if grid is None:
        return ""
    return f"mesh {grid}{f' {training.settings.schedule}' if grid.pipeline > 1 else ''}"


def _say_mesh(training: AssembledTraining, journal: Journal) -> None:
    """Record what each rank holds: as a line, and as mesh.json in the run directory."""
    settings, world, grid = training.settings, training.world, training.settings.mesh
    assert grid is not None
    everyone: list[dict[str, Any]] = everybodys(
        {"host": socket.gethostname(), **training.placed.describe()}, world.control, "for mesh.json"
    )
    if world.rank == 0 and training.saves.path is not None:
        said = {
            "mesh": str(grid),
            "schedule": settings.schedule if grid.pipeline > 1 else None,
            "ranks": everyone,
        }
        (training.saves.path / MESH).write_text(json.dumps(said, indent=1) + "\n", encoding="utf-8")
    held = [each["parameters"] for each in everyone if "parameters" in each]
    whole = "every rank holds the whole model"
    if held:
        least, most = min(held), max(held)
        whole = (
            f"a rank holds {least:,}{'' if least == most else f' to {most:,}'} of"
            f" {everyone[0]['of']:,} parameters"
        )
    journal.event("mesh", f"mesh {grid}: {whole}")


def say_resumed(
    training: AssembledTraining, journal: Journal, found: Checkpoint, changed: str
) -> None:
    """Record that the training resumed from `found`, and what has `changed` in the task since."""
    of = training.length.of_steps
    journal.event(
        "resumed",
        f"resumed from step {found.step}{of}",
        step=found.step,
        workers=training.world.size,
    )
    if changed:
        line = f"warning: the task has changed since step {found.step} was saved: {changed}"
        journal.event("changed", line, step=found.step, changes=changed)
    if training.settings.exact and (
        difference := differences(found.state["machine"], training.identity.machine)
    ):
        journal.event(
            "moved",
            f"warning: this machine differs, so the bits may differ as well: {difference}",
            step=found.step,
        )
