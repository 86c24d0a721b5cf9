"""The numbers of metrics.jsonl in Weights & Biases, MLflow, TensorBoard and a CSV file: `--log`.

Rank 0 logs, so all ranks are one run. The run directory keeps the ids, so a resumed training is
the same run. A logger that opens says up to which step it has each kind of record. It first gets
the later records from metrics.jsonl, so after a kill no step is missing and none is logged twice.

This file is not in integrations/, because the training loop uses it and may not import from there.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, Protocol

from lockstep.config.settings import Settings
from lockstep.errors import UsageError
from lockstep.runtime.disk import write_whole
from lockstep.runtime.extras import missing
from lockstep.training.logger_packages import KINDS, MLflow, TensorBoard, WandB, scalars
from lockstep.training.result import Result

Ended = Literal["FINISHED", "KILLED", "FAILED"]
"""KILLED: stopped on request, and can be resumed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoggedRun:
    """What a logger knows about a training."""

    path: Path
    """The run directory."""
    records: Path
    """metrics.jsonl."""
    task: str
    step: int
    """The step that the training resumes from; 0 at the beginning."""
    parameters: Mapping[str, Any]
    """Hyper-parameters by name."""

    def ids(self) -> dict[str, str]:
        """Return the run ids of earlier processes, by logger."""
        file = self.path / "loggers.json"
        return dict(json.loads(file.read_text("utf-8"))) if file.exists() else {}

    def save_id(self, logger: str, id: str) -> None:
        """Save a logger's run id for the processes that resume this training."""
        write_whole(self.path / "loggers.json", json.dumps(self.ids() | {logger: id}) + "\n")

    def past(self) -> Iterator[dict[str, Any]]:
        """Yield the steps and evaluations before the step that the training resumes from."""
        if self.step and self.records.exists():  # none if the run came from copies elsewhere
            with self.records.open(encoding="utf-8") as lines:
                for line in lines:
                    record = json.loads(line)
                    if record["kind"] in KINDS:
                        yield record


_WITHOUT_SERVER = {"wandb": ". Set WANDB_MODE=offline to log without a key and a server."}


class Logger(Protocol):
    """A logger, opened by its constructor, which takes the LoggedRun."""

    last: Mapping[str, int]
    """The last step that the logger has of each kind of record."""

    def add(self, record: Mapping[str, Any]) -> None: ...
    def close(self, ended: Ended, summary: Mapping[str, Any]) -> None: ...


class Loggers:
    """The loggers of one training. A logger that fails is not used again and leaves a sentence in
    `problems`; the training continues.
    """

    def __init__(self, names: Sequence[str], run: LoggedRun) -> None:
        """Open these loggers; without names, open TensorBoard if it is installed.

        Raises UsageError if a package is missing, or if a logger in `names` cannot open at the
        start of a training.
        """
        self.problems: list[str] = []
        self._open: dict[str, Logger] = {}
        check_installed(names)
        default = ["tensorboard"] if _is_installed("tensorboard") else []
        for name in names or default:
            try:
                logger = self._open[name] = LOGGERS[name](run)
            except Exception as error:
                if names and not run.step:
                    self.close("FAILED")
                    reason = _line(error).rstrip(".") + _WITHOUT_SERVER.get(name, "")
                    raise UsageError("logger-not-opened", name=name, reason=reason) from error
                self._failed(name, error)
                continue
            for record in run.past():
                self._add(name, logger, record)

    def add(self, record: Mapping[str, Any]) -> None:
        """Log a step or an evaluation; other records are ignored."""
        if record["kind"] in KINDS:
            for name, logger in list(self._open.items()):
                self._add(name, logger, record)

    def close(self, ended: Ended, result: Result | None = None) -> None:
        # metrics are already logged, and the headline is one of them
        values = {} if result is None else result.as_json() | {"metrics": {}, "headline": {}}
        summary = dict(_flat(values))
        for name, logger in list(self._open.items()):
            self._attempt(name, partial(logger.close, ended, summary))
        self._open.clear()

    def _add(self, name: str, logger: Logger, record: Mapping[str, Any]) -> None:
        if record["step"] > logger.last[record["kind"]]:
            self._attempt(name, partial(logger.add, record))

    def _attempt(self, name: str, call: Callable[[], None]) -> None:
        if name in self._open:
            try:
                call()
            except Exception as error:
                self._failed(name, error)

    def _failed(self, name: str, error: Exception) -> None:
        self._open.pop(name, None)
        problem = f"warning: logger {name} failed and is not used any more: {_line(error)}"
        self.problems.append(problem)


def hyper_parameters(
    settings: Settings, recipe: Mapping[str, Any], machine: Mapping[str, str]
) -> dict[str, Any]:
    """Return them by name: "global_batch", "optimizer.0.lr", "set.width" (of --set width=8), ..."""
    parameters = {**settings.as_json(), **recipe}
    for name in ("log", "grow", "grow_if_wanted"):
        del parameters[name]
    parameters["set"] = parameters.pop("overrides")
    parameters["machine"] = machine
    return dict(_flat(parameters))


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and "!" in value:  # a tuple, as a checkpoint encodes it
        yield name, str(value["of"])
    elif isinstance(value, Mapping | list):
        pairs = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, part in pairs:
            yield from _flat(part, f"{name}.{key}".lstrip("."))
    elif value is not None:
        yield name, value


def check_installed(names: Sequence[str]) -> None:
    """Raise a UsageError for a logger whose package is not installed."""
    for name in names:
        if name != "csv" and not _is_installed(name):
            raise missing(f"log={name}", name, name)


def _is_installed(package: str) -> bool:
    spec = find_spec(package)
    return spec is not None and spec.origin is not None  # a plain folder has no origin


def _line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


class CSV:
    """metrics.csv in the run directory: a row for each step and each evaluation."""

    def __init__(self, run: LoggedRun) -> None:
        self.last: Mapping[str, int] = dict.fromkeys(KINDS, 0)
        self._path = run.path / "metrics.csv"
        self._columns: list[str] = []
        self._write_again([])

    def add(self, record: Mapping[str, Any]) -> None:
        row = {"step": record["step"], **scalars(record)}
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


LOGGERS: dict[str, Callable[[LoggedRun], Logger]] = {
    "wandb": WandB,
    "mlflow": MLflow,
    "tensorboard": TensorBoard,
    "csv": CSV,
}
