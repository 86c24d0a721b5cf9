"""The numbers of metrics.jsonl in Weights & Biases, MLflow, TensorBoard and a CSV file: `--log`.

Rank 0 logs, so all ranks are one run. The run directory keeps the ids, so a resumed training is
the same run. A logger that opens says up to which step it has each kind of record. It is given the
later ones from metrics.jsonl first, so no step is missing and none is there twice after a kill.

It is here and not in integrations/, because the training loop opens it and imports go down.
"""

from __future__ import annotations

import csv
import json
import os
import re
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any, Literal, Protocol

from lockstep.config.settings import Settings
from lockstep.errors import UsageError
from lockstep.runtime.disk import write_whole
from lockstep.runtime.extras import install, warn_untested
from lockstep.training.metrics import TelemetryFile
from lockstep.training.result import Result

Ended = Literal["FINISHED", "KILLED", "FAILED"]
"""KILLED: stopped as asked, to be resumed."""
KINDS = ("step", "evaluate")
_FLUSH_EVERY = 1.0  # s
_PATIENCE = 20.0  # s at the end, while the other ranks wait; a stall is declared after 30
_SCALARS = ("loss", "lr", "grad_norm", "gradient_age", "samples_per_s", "epoch")
_NUMBERS = count()  # of this process's event files: two may begin in one second
_BATCH, _PARAMETERS, _LONGEST = 1000, 100, 6000  # what MLflow takes at once, and of one value


@dataclass(frozen=True, kw_only=True, slots=True)
class LoggedRun:
    """What loggers are told of a training."""

    path: Path
    """The run directory."""
    records: Path
    """metrics.jsonl."""
    task: str
    step: int
    """That it resumes from; 0 at the beginning."""
    parameters: Mapping[str, Any]
    """Hyper-parameters by name."""

    def id_of(self, logger: str) -> str | None:
        """As an earlier process has kept it."""
        return self._ids().get(logger)

    def keep(self, logger: str, id: str) -> None:
        """For the processes that resume this training."""
        write_whole(self.path / "loggers.json", json.dumps(self._ids() | {logger: id}) + "\n")

    def _ids(self) -> dict[str, str]:
        file = self.path / "loggers.json"
        found: dict[str, str] = json.loads(file.read_text("utf-8")) if file.exists() else {}
        return found

    def past(self) -> Iterator[dict[str, Any]]:
        """Steps and evaluations before the one that it resumes from."""
        if self.step:
            with self.records.open(encoding="utf-8") as lines:
                yield from (each for each in map(json.loads, lines) if each["kind"] in KINDS)


class Logger(Protocol):
    """Opened by its constructor, which is given the LoggedRun."""

    held: Mapping[str, int]
    """The last step of each kind of record that it has."""

    def add(self, record: Mapping[str, Any]) -> None: ...
    def close(self, ended: Ended, summary: Mapping[str, Any]) -> None: ...


class Loggers:
    """Those of one training. One that fails is left out from then on, with a sentence in
    `problems`: training does not end for it.
    """

    def __init__(self, names: tuple[str, ...], run: LoggedRun) -> None:
        """No names: TensorBoard, if it is installed.

        Raises UsageError where a package is missing, or a logger cannot open at the beginning of a
        training.
        """
        self.problems: list[str] = []
        self._open: dict[str, Logger] = {}
        check_installed(names)
        for name in names or ("tensorboard",) * _is_installed("tensorboard"):
            try:
                logger = self._open[name] = LOGGERS[name](run)
            except Exception as error:
                if not run.step:
                    self.close("FAILED")
                    raise UsageError("logger-not-opened", name=name, reason=_line(error)) from error
                self._failed(name, error)
                continue
            for record in run.past():
                self._add(name, logger, record)

    def add(self, record: Mapping[str, Any]) -> None:
        """A step or an evaluation; of anything else nothing is logged."""
        if record["kind"] in KINDS:
            for name, logger in list(self._open.items()):
                self._add(name, logger, record)

    def close(self, ended: Ended, result: Result | None = None) -> None:
        summary = {} if result is None else dict(_flat(result.as_json()))
        for name, logger in list(self._open.items()):
            self._attempt(name, partial(logger.close, ended, summary))
        self._open.clear()

    def _add(self, name: str, logger: Logger, record: Mapping[str, Any]) -> None:
        if record["step"] > logger.held[record["kind"]]:
            self._attempt(name, partial(logger.add, record))

    def _attempt(self, name: str, call: Callable[[], None]) -> None:
        if name in self._open:
            try:
                call()
            except Exception as error:
                self._failed(name, error)

    def _failed(self, name: str, error: Exception) -> None:
        self._open.pop(name, None)
        self.problems.append(
            f"warning: logger {name} failed and is left out from here on: {_line(error)}"
        )


def hyper_parameters(
    settings: Settings, recipe: Mapping[str, Any], machine: Mapping[str, str]
) -> dict[str, Any]:
    """By name, such as "global_batch", "optimizer.0.lr", and "set.width" of `--set width=8`."""
    chosen = settings.as_json()
    for name in ("log", "grow", "grow_if_wanted", "settings_file"):
        del chosen[name]
    given = {"set": chosen.pop("overrides"), "machine": machine}
    return dict(_flat({**chosen, **recipe, **given}))


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and "!" in value:  # a tuple, as a checkpoint has it
        yield name, str(value["of"])
    elif isinstance(value, Mapping | list):
        pairs = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, part in pairs:
            yield from _flat(part, f"{name}.{key}".lstrip("."))
    elif value is not None:
        yield name, value


def check_installed(names: tuple[str, ...]) -> None:
    """Raise a UsageError for a logger whose package is not installed."""
    for name in names:
        if name != "csv" and not _is_installed(name):
            raise UsageError(
                "missing-extra", what=f"log={name}", package=name, install=install(name)
            )


def _is_installed(package: str) -> bool:
    return find_spec(package) is not None


def _line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def _scalars(record: Mapping[str, Any]) -> dict[str, float]:
    if record["kind"] == "evaluate":
        return {f"evaluate/{name}": float(value) for name, value in record["metrics"].items()}
    found = {f"train/{name}": float(record[name]) for name in _SCALARS if name in record}
    return {**found, "train/workers": len(record["samples_by_rank"])}


class WandB:
    """Its variables are honoured: WANDB_MODE, WANDB_PROJECT, WANDB_NAME, WANDB_DIR and others."""

    def __init__(self, run: LoggedRun) -> None:
        import wandb

        warn_untested("wandb", "0.31", "0.31")
        given = os.environ
        self._run = wandb.init(
            id=run.id_of("wandb"),
            resume="allow",
            project=given.get("WANDB_PROJECT", run.task),
            name=given.get("WANDB_NAME", run.path.name),
            dir=given.get("WANDB_DIR", str(run.path)),
            config=dict(run.parameters),
            # the ranks' logs are in the run directory
            settings=wandb.Settings(
                console=given.get("WANDB_CONSOLE", "off"), finish_timeout=_PATIENCE
            ),
        )
        run.keep("wandb", self._run.id)
        self.held = dict.fromkeys(KINDS, self._run.starting_step - 1)

    def add(self, record: Mapping[str, Any]) -> None:
        self._run.log(_scalars(record), step=record["step"])

    def close(self, ended: Ended, summary: Mapping[str, Any]) -> None:
        self._run.summary.update(summary)
        if ended == "KILLED":
            self._run.mark_preempting()
        self._run.finish(exit_code=int(ended != "FINISHED"))


class MLflow:
    """In the store of MLFLOW_TRACKING_URI, else in mlflow.db in the run directory. Numbers are
    sent by a thread, because a store that does not answer would hold the training up.
    """

    def __init__(self, run: LoggedRun) -> None:
        import mlflow

        warn_untested("mlflow-skinny", "3.17", "3.17")
        elsewhere = mlflow.is_tracking_uri_set()
        uri = None if elsewhere else f"sqlite:///{run.path.absolute()}/mlflow.db"
        self._client = mlflow.MlflowClient(tracking_uri=uri)
        kept = run.id_of("mlflow")
        if kept is None:
            artifacts = None if elsewhere else (run.path.absolute() / "mlartifacts").as_uri()
            kept = self._created(run, artifacts)
            run.keep("mlflow", kept)
        self._id = kept
        self._client.set_terminated(kept, "RUNNING")
        self.held = {kind: self._last(f"{where}/loss") for kind, where in _WHERE.items()}
        self._waiting: list[Any] = []
        self._send_next = 0.0
        self._thread = ThreadPoolExecutor(1)
        self._sending: Future[None] = self._thread.submit(self._send, [])

    def _created(self, run: LoggedRun, artifacts: str | None) -> str:
        from mlflow.entities import Param

        given = os.environ
        experiment = given.get("MLFLOW_EXPERIMENT_ID")
        if experiment is None:
            name = given.get("MLFLOW_EXPERIMENT_NAME", run.task)
            found = self._client.get_experiment_by_name(name)
            experiment = (
                self._client.create_experiment(name, artifacts)
                if found is None
                else found.experiment_id
            )
        id: str = self._client.create_run(experiment, run_name=run.path.name).info.run_id
        parameters = [Param(name, str(value)[:_LONGEST]) for name, value in run.parameters.items()]
        for first in range(0, len(parameters), _PARAMETERS):
            self._client.log_batch(id, params=parameters[first : first + _PARAMETERS])
        return id

    def _last(self, name: str) -> int:
        return max(
            (each.step for each in self._client.get_metric_history(self._id, name)), default=0
        )

    def add(self, record: Mapping[str, Any]) -> None:
        from mlflow.entities import Metric

        now = time.time()
        self._waiting += [
            # the only characters that a name may have there
            Metric(re.sub(r"[^\w\-. :/]", "_", name), value, int(now * 1000), record["step"])
            for name, value in _scalars(record).items()
        ]
        if now >= self._send_next and self._sending.done():
            self._sending.result()
            self._sending = self._thread.submit(self._send, self._waiting)
            self._waiting, self._send_next = [], now + _FLUSH_EVERY

    def _send(self, metrics: list[Any]) -> None:
        for first in range(0, len(metrics), _BATCH):
            self._client.log_batch(self._id, metrics=metrics[first : first + _BATCH])

    def close(self, ended: Ended, summary: Mapping[str, Any]) -> None:
        end = self._thread.submit(self._end, ended, summary)
        self._thread.shutdown(wait=False)
        end.result(_PATIENCE)

    def _end(self, ended: Ended, summary: Mapping[str, Any]) -> None:
        self._sending.result()
        self._send(self._waiting)
        for name, value in summary.items():
            self._client.set_tag(self._id, name, str(value))
        self._client.set_terminated(self._id, ended)


class TensorBoard:
    """An event file of each process in the run directory, by TensorBoard's own package.

    TensorBoard's own writer opens its file by name for each write, where another may be by then.
    """

    def __init__(self, run: LoggedRun) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter
        from torch.utils.tensorboard.summary import hparams

        self._event, self._summary = Event, Summary
        name = f"events.out.tfevents.{time.time():010.0f}.{socket.gethostname()}.{os.getpid()}.{next(_NUMBERS)}"
        self._file = TelemetryFile(run.path / name)
        self._records = RecordWriter(self._file)
        self._write(file_version="brain.Event:2")
        # has TensorBoard forget what earlier files say of this step and later ones
        self._write(step=run.step, session_log=SessionLog(status=SessionLog.START))
        self.held = dict.fromkeys(KINDS, run.step - 1)
        for part in hparams(dict(run.parameters), {"train/loss": 0.0}):
            self._write(step=0, summary=part)
        self._file.flush()
        self._flush_next = 0.0

    def add(self, record: Mapping[str, Any]) -> None:
        values = [
            self._summary.Value(tag=tag, simple_value=value)
            for tag, value in _scalars(record).items()
        ]
        self._write(step=record["step"], summary=self._summary(value=values))
        if (now := time.monotonic()) > self._flush_next:
            self._file.flush()
            self._flush_next = now + _FLUSH_EVERY

    def close(self, ended: Ended, summary: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard.summary import text

        for name, value in summary.items():
            self._write(step=0, summary=text(name, str(value)))
        self._file.close()

    def _write(self, **fields: Any) -> None:
        self._records.write(self._event(wall_time=time.time(), **fields).SerializeToString())


class CSV:
    """metrics.csv in the run directory: a row for each step and each evaluation."""

    def __init__(self, run: LoggedRun) -> None:
        self.held = dict.fromkeys(KINDS, 0)
        self._path = run.path / "metrics.csv"
        self._columns: list[str] = []
        self._write_again([])

    def add(self, record: Mapping[str, Any]) -> None:
        row = {"step": record["step"], **_scalars(record)}
        if row.keys() - self._columns:
            self._file.close()
            with self._path.open(encoding="utf-8", newline="") as file:
                rows = list(csv.DictReader(file))
            self._columns += [name for name in row if name not in self._columns]
            self._write_again(rows)
        self._rows.writerow(row)

    def _write_again(self, rows: list[dict[str, str]]) -> None:
        self._file = self._path.open("w", encoding="utf-8", newline="", buffering=1)
        self._rows = csv.DictWriter(self._file, self._columns)
        if self._columns:
            self._rows.writeheader()
        self._rows.writerows(rows)

    def close(self, ended: Ended, summary: Mapping[str, Any]) -> None:
        self._file.close()


_WHERE = {"step": "train", "evaluate": "evaluate"}
LOGGERS: dict[str, Callable[[LoggedRun], Logger]] = {
    "wandb": WandB,
    "mlflow": MLflow,
    "tensorboard": TensorBoard,
    "csv": CSV,
}
