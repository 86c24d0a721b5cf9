"""Where a training's records go: metrics.jsonl, loggers and the screen on rank 0, the task's callbacks
on the ranks that asked; and what it says of itself there: how it trains, who holds what, where it
goes on from.

The training loop reports what happened and knows none of these places. The screen is stderr: a live
bar on a terminal, plain lines anywhere else; stdout of `lockstep train` is its last line alone. The
bar is redrawn by `step` itself, at most ten times a second, so that it needs no thread.
"""

from __future__ import annotations

import json
import socket
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from lockstep.checkpoints.files import Checkpoint
from lockstep.collectives.broadcast_json import everybodys
from lockstep.config.task import Record, Task
from lockstep.data.windows import Window
from lockstep.errors import Preempted
from lockstep.gradients.layout import BUCKET
from lockstep.launcher.logs import Tee
from lockstep.step.step_result import StepResult
from lockstep.training.loggers import Ended, Loggers
from lockstep.training.metrics import MetricsFile
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
    """One training's. `steps` and `epochs` are how long it is meant to be; `says_skips`: nobody
    else tells of a step that was skipped; `sent()`: bytes.

    `loggers`: rank 0's. `screen` False: nothing is shown.
    """

    def __init__(
        self,
        task: Task,
        world: World,
        run: RunDirectory | None,
        *,
        steps: int | None,
        epochs: int | None,
        says_skips: bool,
        sent: Callable[[], int],
        loggers: Loggers | None = None,
        screen: bool = True,
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
            if screen:
                self._screen = progress(steps, epochs)
                self._open.callback(self._screen.close)
        calls = world.rank == 0 or task.callbacks_on == "all"
        self._on_step = task.on_step if calls else None
        self._on_evaluate = task.on_evaluate if calls else None
        self._last: Mapping[str, Any] | None = None
        self._clock, self._sent = time.perf_counter(), sent()

    def event(self, event: str, line: str | None = None, **facts: Any) -> None:
        """Something that happened once. `line` is shown."""
        self._write({"kind": "event", "event": event, **({"line": line} if line else {}), **facts})
        if line:
            self._say(line)

    def step(self, window: Window, lr: float, result: StepResult) -> None:
        """One optimizer step, taken with learning rate `lr`."""
        # known where `clip` is set
        told = {"lr": lr, **({} if result.norm is None else {"grad_norm": result.norm})}
        skipped = None if result.applied else result.reason
        self._step(
            window, result, told, at=time.perf_counter(), sent=result.bytes_sent, skipped=skipped
        )

    def applied(self, result: StepResult) -> None:
        """The windows that a parameter server has applied since. Rank 0 knows of them."""
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
            self._screen.step(record)
        if skipped is not None:
            line = f"step {record['step']} was skipped: {skipped}" if self._says_skips else None
            self.event("step skipped", line, step=record["step"], reason=skipped)
        _call(self._on_step, record)

    def evaluated(
        self, step: int, epoch: int, metrics: Mapping[str, float], seconds: float
    ) -> None:
        """One evaluation, after `step` steps, in or at the end of `epoch`, both counted from 1."""
        record = {
            "kind": "evaluate",
            "step": step,
            "epoch": epoch,
            "metrics": dict(metrics),
            "seconds": seconds,
        }
        self._write(record)
        shown = ", ".join(f"{name} {value:.4f}" for name, value in metrics.items())
        trained = (
            f", training loss {self._last['loss']:.4f}, {self._last['samples_per_s']:,.0f}"
            " samples/s"
            if self._last
            else ""
        )
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
        """What the training came to: loggers get it when they are closed."""
        self._result = result

    def _start_watch(self) -> None:
        """What passes between here and the next step is that step's."""
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
    """Every rank calls it."""
    settings, world, method = training.settings, training.world, training.stepper.method
    came_from = {} if settings.settings_file is None else {"settings_file": settings.settings_file}
    line = f"{training.loader.describe(training.placed.holder)}; {_how(training)}"
    journal.event(
        "start",
        line,
        workers=world.size,
        steps=training.length.steps,
        epochs=training.length.epochs,
        **came_from,
    )
    if settings.mesh is not None:
        _say_mesh(training, journal)
    if not method.world_size_free:
        journal.event(
            "method",
            "the number of workers is part of what is trained: another one gives other weights",
        )
    if settings.exact:
        journal.event(
            "exact",
            "exact: sums along one tree over the micro-batches of a step;"
            f" {world.compute_deterministically()}",
        )


def _how(training: AssembledTraining) -> str:
    settings, method = training.settings, training.stepper.method
    buckets = (
        "" if settings.bucket_mb == BUCKET / 2**20 else f" in buckets of {settings.bucket_mb:g} MiB"
    )
    what = "meetings" if method.local is not None else "gradients"
    replicas = training.placed.replicas(training.world.group).size
    silent = method.server is not None or (replicas == 1 and method.compress is None)
    reduction = "" if silent else f"{what} by {training.stepper.reducer.reduction.name}{buckets}, "
    threads = [] if settings.threads is None else [_a_rank(settings.threads, "thread")]
    workers = [_a_rank(settings.loader_workers, "loader worker")] if settings.loader_workers else []
    return ", ".join(
        [f"{reduction}{method.describe()}{'' if method.alone else ' update'}", *threads, *workers]
    )


def _a_rank(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count > 1)} a rank"


def mesh_in_words(training: AssembledTraining) -> str:
    """For the last line."""
    grid = training.settings.mesh
    if grid is None:
        return ""
    return f"mesh {grid}{f' {training.settings.schedule}' if grid.pipeline > 1 else ''}"


def _say_mesh(training: AssembledTraining, journal: Journal) -> None:
    """Who holds what: a line, and mesh.json in the run directory."""
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
    """From `found`, since which the task has `changed`."""
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
            f"the bits may differ from those of a run that stayed where it was: {difference}",
            step=found.step,
        )


_REDRAW_SECONDS = 0.1
_LINE_SECONDS = 10.0


class Progress(Protocol):
    """Shows one training."""

    def say(self, line: str) -> None: ...
    def step(self, record: Mapping[str, Any]) -> None: ...
    def close(self) -> None: ...


def progress(steps: int | None, epochs: int | None) -> Progress:
    """For a training of that many optimizer steps (None: nobody knows): a bar if stderr is a
    terminal, else lines.
    """
    return Live(steps, epochs) if sys.stderr.isatty() else Plain(steps, epochs)


class Plain:
    """Lines, at most one every ten seconds besides what is said."""

    def __init__(self, steps: int | None, epochs: int | None, out: TextIO | None = None) -> None:
        """`out`: where they go; None: stderr."""
        self._steps, self._epochs, self._out = steps, epochs, out
        self._began = self._shown = time.monotonic()

    def say(self, line: str) -> None:
        print(line, file=self._out or sys.stderr, flush=True)

    def step(self, record: Mapping[str, Any]) -> None:
        now = time.monotonic()
        if now - self._shown >= _LINE_SECONDS:
            self._shown = now
            self.say(
                f"{where(record, self._steps, self._epochs)}:"
                f" {describe(record, self._steps, now - self._began)}"
            )

    def close(self) -> None:
        pass


class Live:
    """One line that is redrawn; what is said stands above it. A log that copies the terminal
    gets the plain lines in its place.
    """

    def __init__(self, steps: int | None, epochs: int | None) -> None:
        from rich.console import Console  # only on a terminal: it takes a while
        from rich.file_proxy import FileProxy
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as Bars

        self._steps, self._epochs = steps, epochs
        error = sys.stderr
        self._log = Plain(steps, epochs, error.copy) if isinstance(error, Tee) else None
        self._console = (
            Console(file=error.stream) if isinstance(error, Tee) else Console(stderr=True)
        )
        self._tees = [
            each for each in (sys.stdout, error) if isinstance(each, Tee) and each.isatty()
        ]
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.fields[state]}", markup=False),
        )
        # then rich has what others print stand above the bar, else it is done here, and copied
        theirs = self._log is None
        self._bars = Bars(
            *columns,
            console=self._console,
            auto_refresh=False,
            transient=True,
            redirect_stdout=theirs,
            redirect_stderr=theirs,
        )
        self._bar = self._bars.add_task("starting", total=steps, state="")
        self._began = time.monotonic()
        self._drawn = 0.0
        self._bars.start()
        for each in self._tees:
            each.stream = FileProxy(self._console, each.stream)

    def say(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)
        if self._log is not None:
            self._log.say(line)

    def step(self, record: Mapping[str, Any]) -> None:
        if self._log is not None:
            self._log.step(record)
        now = time.monotonic()
        if now - self._drawn < _REDRAW_SECONDS and record["step"] != self._steps:
            return
        self._drawn = now
        state = describe(record, self._steps, now - self._began)
        self._bars.update(
            self._bar,
            completed=record["step"],
            description=where(record, self._steps, self._epochs),
            state=state,
        )
        self._bars.refresh()

    def close(self) -> None:
        self._bars.stop()
        for each in self._tees:
            each.flush()
            each.stream = each.stream.rich_proxied_file


def of(done: int, total: int | None) -> str:
    """`3/12`, and `3` where nobody knows how many there are."""
    return f"{done}/{total}" if total is not None else str(done)


def where(record: Mapping[str, Any], steps: int | None, epochs: int | None) -> str:
    return f"epoch {of(record['epoch'], epochs)}, step {of(record['step'], steps)}"


def describe(record: Mapping[str, Any], steps: int | None, elapsed: float) -> str:
    """A step in a few words: "loss 0.1234, 5,210 samples/s, 12 s left", if the rest goes as what
    is done went in `elapsed` seconds.
    """
    done = record["step"]
    left = "" if steps is None else f", {clock((steps - done) * elapsed / done)} left"
    return f"loss {record['loss']:.4f}, {record['samples_per_s']:,.0f} samples/s{left}"


def clock(seconds: float) -> str:
    """12 s, 3:05, 2:03:05."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
