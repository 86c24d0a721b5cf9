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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import lockstep
from lockstep.checkpoints.files import Checkpoint
from lockstep.collectives.broadcast_json import everybodys
from lockstep.config.task import Record, Task
from lockstep.data.windows import Window, counted
from lockstep.errors import Preempted
from lockstep.gradients.layout import BUCKET
from lockstep.runtime.binding import bound_here
from lockstep.runtime.step_clock import StepTimes
from lockstep.step.step_result import StepResult
from lockstep.training.loggers import Ended, Loggers
from lockstep.training.metrics import SKIPPED, MetricsFile
from lockstep.training.progress import Progress, ProgressFacts, of, progress
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

    `task`: has the callbacks; None for a script. `says_skips`: print skipped steps, because nothing else reports them. `sent`: returns the bytes
    sent so far. `loggers`: for rank 0. `facts`: what rank 0 shows; None: show nothing.
    """

    def __init__(
        self,
        task: Task | None,
        world: World,
        run: RunDirectory | None,
        *,
        epochs: int | None,
        says_skips: bool,
        sent: Callable[[], int],
        loggers: Loggers | None = None,
        facts: ProgressFacts | None = None,
    ) -> None:
        self._epochs = epochs
        self._says_skips = says_skips
        self._bytes_sent = sent
        self._run = run
        self._loggers = loggers
        self._open = ExitStack()
        self._file: MetricsFile | None = None
        self._screen: Progress | None = None
        self._result: Result | None = None
        if world.rank == 0 and run is not None:
            self._file = self._open.enter_context(MetricsFile(run.metrics))
        if world.rank == 0 and facts is not None:
            self._screen = progress(facts)
            self._open.callback(self._screen.close)
            if run is not None:
                self._print(f"run directory: {run.shown}")
        self._on_step: Callable[[Record], None] | None = None
        self._on_evaluate: Callable[[Record], None] | None = None
        if task is not None and (world.rank == 0 or task.callbacks_on == "all"):
            self._on_step = task.on_step
            self._on_evaluate = task.on_evaluate
        self._last: Mapping[str, Any] | None = None
        self._times: Sequence[StepTimes] = ()  # that the screen has not shown yet
        self._clock = time.perf_counter()
        self._sent = sent()

    def event(self, event: str, line: str | None = None, **facts: Any) -> None:
        """Record an event; print `line` if it is given."""
        record = {"kind": "event", "event": event}
        if line:
            record["line"] = line
        self._write(record | facts)
        if line:
            self._print(line)

    def step(
        self,
        window: Window,
        lr: float,
        result: StepResult,
        logged: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        """Record one optimizer step, taken with learning rate `lr`. `logged`: further numbers."""
        numbers = {"lr": lr}
        if result.norm is not None:  # it is known only if `clip` is set
            numbers["grad_norm"] = result.norm
        numbers |= logged
        skipped = None if result.applied else result.reason
        self._times = result.times
        self._step(
            window, result, numbers, at=time.perf_counter(), sent=result.bytes_sent, skipped=skipped
        )

    def applied(self, result: StepResult) -> None:
        """Record the windows that a parameter server has applied since the last call. Only rank 0
        has them.
        """
        self._times = result.times
        for window in result.windows:
            numbers = {"gradient_age": window.age, "lr": window.lr}
            skipped = window.reason or None
            self._step(
                window, window, numbers, at=window.at, sent=result.bytes_sent, skipped=skipped
            )

    def _step(
        self,
        window: Window | AppliedWindow,
        result: StepResult | AppliedWindow,
        numbers: Mapping[str, float],
        *,
        at: float,
        sent: int,
        skipped: str | None,
    ) -> None:
        record = {
            "kind": "step",
            "step": window.step + 1,
            "epoch": window.epoch + 1,
            "loss": result.loss,
            "weight": result.weight,
            "samples_by_rank": list(result.samples_by_rank),
            **numbers,
            "samples_per_s": sum(result.samples_by_rank) / max(at - self._clock, 1e-9),
            "bytes_sent": sent - self._sent,
        }
        self._clock = at
        self._sent = sent
        self._last = record
        self._write(record)
        if self._screen is not None:
            self._screen.step(record, self._times)
            self._times = ()
        if skipped is not None:
            line = f"step {record['step']} was skipped: {skipped}" if self._says_skips else None
            self.event(SKIPPED, line, step=record["step"], reason=skipped)
        if self._on_step is not None:
            self._on_step(record)

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
        if self._last:
            shown += f", training loss {self._last['loss']:.4f}"
        self._print(f"epoch {of(epoch, self._epochs)}, step {step}: {shown}")
        if self._on_evaluate is not None:
            self._on_evaluate(record)
        self._start_watch()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._open:
            if self._loggers is not None:
                ended: Ended = "FINISHED" if self._result else "FAILED"
                if kind in (Preempted, MoreWorkers, KeyboardInterrupt):
                    ended = "KILLED"
                self._loggers.close(ended, self._result)
                self._report_problems(self._loggers)

    def finished(self, result: Result) -> None:
        """Keep the result; loggers get it when they are closed."""
        self._result = result

    def _start_watch(self) -> None:
        """Count time and bytes from here on for the next step."""
        self._clock = time.perf_counter()
        self._sent = self._bytes_sent()

    def _write(self, record: Record) -> None:
        if self._file is not None and self._run is not None:
            self._run.check()
            self._file.write(record)
        if self._loggers is not None:
            self._loggers.add(record)
            self._report_problems(self._loggers)

    def _report_problems(self, loggers: Loggers) -> None:
        while loggers.problems:
            self.event("logger failed", loggers.problems.pop(0))

    def _print(self, line: str) -> None:
        if self._screen is not None:
            self._screen.print(line)


def record_start(training: AssembledTraining, journal: Journal) -> None:
    """Record how the training starts. Every rank calls it."""
    settings = training.settings
    world = training.world
    shares = training.loader.describe(training.model_shard.holder)
    line = f"{shares}; {', '.join(_method_in_words(training))}"
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
        _record_mesh(training, journal)
    if not training.stepper.method.world_size_free:
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


def _method_in_words(training: AssembledTraining) -> Iterator[str]:
    """Yield how gradients are summed, how parameters are updated, and what a rank has."""
    settings = training.settings
    method = training.stepper.method
    replicas = training.model_shard.replicas(training.world.group).size
    if not method.server and (replicas > 1 or method.compress is not None):
        summed = "gradients" if method.local is None else "synchronizations"
        reduction = f"{summed} by {training.stepper.reducer.reduction.name}"
        if settings.bucket_mb != BUCKET / 2**20:
            reduction += f" in buckets of {settings.bucket_mb:g} MiB"
        yield reduction
    yield method.describe() if method.alone else f"{method.describe()} update"
    if settings.threads is not None:
        yield f"{counted(settings.threads, 'thread')} a rank"
    if bound_here():
        yield "ranks bound to cores"
    if settings.skip is not None:
        yield f"without steps {settings.left_out}"
    if settings.loader_workers:
        yield f"{counted(settings.loader_workers, 'loader worker')} a rank"


def mesh_in_words(training: AssembledTraining) -> str:
    """Return the mesh and its schedule, for the last line."""
    grid = training.settings.mesh
    if grid is None:
        return ""
    return f"mesh {grid} {training.settings.schedule}" if grid.pipeline > 1 else f"mesh {grid}"


def _record_mesh(training: AssembledTraining, journal: Journal) -> None:
    """Record what each rank holds: as a line, and as mesh.json in the run directory."""
    world = training.world
    grid = training.settings.mesh
    assert grid is not None
    own = {"host": socket.gethostname(), **training.model_shard.describe()}
    ranks: list[dict[str, Any]] = everybodys(own, world.control, "for mesh.json")
    if world.rank == 0 and training.saving.path is not None:
        schedule = training.settings.schedule if grid.pipeline > 1 else None
        contents = {"mesh": str(grid), "schedule": schedule, "ranks": ranks}
        text = json.dumps(contents, indent=1) + "\n"
        (training.saving.path / MESH).write_text(text, encoding="utf-8")
    sizes = [rank["parameters"] for rank in ranks if "parameters" in rank]
    if sizes:
        least, most = min(sizes), max(sizes)
        part = f"{least:,}" if least == most else f"{least:,} to {most:,}"
        holding = f"a rank holds {part} of {ranks[0]['of']:,} parameters"
    else:
        holding = "every rank holds the whole model"
    journal.event("mesh", f"mesh {grid}: {holding}")


def record_resumed(
    training: AssembledTraining, journal: Journal, checkpoint: Checkpoint, changed: str
) -> None:
    """Record that the training resumed from this checkpoint, and what has `changed` in the task
    since.
    """
    step = checkpoint.step
    line = f"resumed from step {step}{training.length.of_steps}"
    journal.event("resumed", line, step=step, workers=training.world.size)
    if changed:
        line = f"warning: the task has changed since step {step} was saved: {changed}"
        journal.event("changed", line, step=step, changes=changed)
    difference = ""
    if training.settings.exact:
        difference = differences(checkpoint.state["machine"], training.identity.machine)
    if difference:
        line = f"warning: this machine differs, so the bits may differ as well: {difference}"
        journal.event("moved", line, step=step)
