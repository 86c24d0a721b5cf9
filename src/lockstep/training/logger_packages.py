"""Weights & Biases, MLflow and TensorBoard as loggers (loggers.py). Each uses its own package,
which is imported when the logger opens.
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Mapping
from concurrent.futures import Future, wait
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

from lockstep.collectives.background import Background
from lockstep.runtime.extras import warn_untested
from lockstep.training.metrics import TelemetryFile

if TYPE_CHECKING:
    from lockstep.training.loggers import Ended, LoggedRun

KINDS = {"step": "train", "evaluate": "evaluate"}
"""The kinds of records that are logged, and the prefix of their numbers' names."""
_SEND_EVERY = 1.0  # s
_PATIENCE = 10.0  # s that each may take at the end: others wait, and a stall is declared after 30
_SCALARS = ("loss", "lr", "grad_norm", "gradient_age", "samples_per_s", "epoch")
_NUMBERS = count()  # of this process's event files: two may start in the same second
# MLflow's limits: metrics and parameters per request, characters of a parameter's value
_BATCH = 1000
_PARAMETERS = 100
_LONGEST = 6000


def scalars(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a step or an evaluation, by the names that all loggers use."""
    if record["kind"] == "evaluate":
        return {f"evaluate/{name}": float(value) for name, value in record["metrics"].items()}
    numbers = {f"train/{name}": float(record[name]) for name in _SCALARS if name in record}
    return {**numbers, "train/workers": len(record["samples_by_rank"])}


class WandB:
    """Honours wandb's variables: WANDB_MODE, WANDB_PROJECT, WANDB_NAME, WANDB_DIR and others."""

    def __init__(self, run: LoggedRun) -> None:
        import wandb

        warn_untested("wandb", "0.31", "0.31")
        environment = os.environ
        settings = wandb.Settings(finish_timeout=_PATIENCE, init_timeout=2 * _PATIENCE)
        if "WANDB_CONSOLE" not in environment:
            settings.console = "off"  # the ranks' logs are in the run directory
        self._run = wandb.init(
            id=run.ids().get("wandb"),
            resume="allow",
            project=environment.get("WANDB_PROJECT", run.task),
            name=environment.get("WANDB_NAME", run.path.name),
            dir=environment.get("WANDB_DIR", str(run.path)),
            config=dict(run.parameters),
            settings=settings,
        )
        run.save_id("wandb", self._run.id)
        self.last: Mapping[str, int] = dict.fromkeys(KINDS, self._run.starting_step - 1)

    def add(self, record: Mapping[str, Any]) -> None:
        self._run.log(scalars(record), step=record["step"])

    def close(self, ended: Ended, summary: Mapping[str, Any]) -> None:
        self._run.summary.update(dict(summary))
        if ended == "KILLED":
            self._run.mark_preempting()
        self._run.finish(exit_code=int(ended != "FINISHED"))


class MLflow:
    """Logs to the store of MLFLOW_TRACKING_URI, else to mlflow.db in the run directory. A thread
    sends the numbers, because a store that does not answer would block the training.
    """

    def __init__(self, run: LoggedRun) -> None:
        import mlflow

        warn_untested("mlflow-skinny", "3.17", "3.17")
        elsewhere = mlflow.is_tracking_uri_set()
        uri = None if elsewhere else f"sqlite:///{run.path.absolute()}/mlflow.db"
        self._client = mlflow.MlflowClient(tracking_uri=uri)
        id = run.ids().get("mlflow")
        if id is None:
            artifacts = None if elsewhere else (run.path.absolute() / "mlartifacts").as_uri()
            id = self._created(run, artifacts)
            run.save_id("mlflow", id)
        self._id = id
        self._client.update_run(id, status="RUNNING")
        self.last: Mapping[str, int] = {
            kind: self._last_step(f"{prefix}/loss") for kind, prefix in KINDS.items()
        }
        self._waiting: list[Any] = []
        self._send_next = 0.0
        self._thread = Background("lockstep mlflow")
        self._sending: Future[None] = self._thread.submit(partial(self._send, []))

    def _created(self, run: LoggedRun, artifacts: str | None) -> str:
        from mlflow.entities import Param

        experiment_id = os.environ.get("MLFLOW_EXPERIMENT_ID")
        if experiment_id is None:
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME", run.task)
            experiment = self._client.get_experiment_by_name(name)
            experiment_id = (
                self._client.create_experiment(name, artifacts)
                if experiment is None
                else experiment.experiment_id
            )
        id: str = self._client.create_run(experiment_id, run_name=run.path.name).info.run_id
        parameters = [Param(name, str(value)[:_LONGEST]) for name, value in run.parameters.items()]
        for first in range(0, len(parameters), _PARAMETERS):
            self._client.log_batch(id, params=parameters[first : first + _PARAMETERS])
        return id

    def _last_step(self, name: str) -> int:
        history = self._client.get_metric_history(self._id, name)
        return max((metric.step for metric in history), default=0)

    def add(self, record: Mapping[str, Any]) -> None:
        from mlflow.entities import Metric

        now = time.time()
        for name, value in scalars(record).items():
            allowed = re.sub(r"[^\w\-. :/]", "_", name)  # the characters that MLflow allows
            self._waiting.append(Metric(allowed, value, int(now * 1000), record["step"]))
        if now >= self._send_next and self._sending.done():
            self._sending.result()
            self._sending = self._thread.submit(partial(self._send, self._waiting))
            self._waiting = []
            self._send_next = now + _SEND_EVERY

    def _send(self, metrics: list[Any]) -> None:
        for first in range(0, len(metrics), _BATCH):
            self._client.log_batch(self._id, metrics=metrics[first : first + _BATCH])

    def close(self, ended: Ended, summary: Mapping[str, Any]) -> None:
        end = self._thread.submit(partial(self._end, ended, summary))
        if wait([end], _PATIENCE).not_done:
            raise TimeoutError(f"the store has not taken everything within {_PATIENCE:g} s")
        self._thread.close()
        end.result()

    def _end(self, ended: Ended, summary: Mapping[str, Any]) -> None:
        self._sending.result()
        self._send(self._waiting)
        for name, value in summary.items():
            self._client.set_tag(self._id, name, str(value))
        self._client.set_terminated(self._id, ended)


class TensorBoard:
    """An event file per process in the run directory, by TensorBoard's own package.

    TensorBoard's own writer is not used: it opens its file by name for each write, and by then
    another file may have that name.
    """

    def __init__(self, run: LoggedRun) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter
        from torch.utils.tensorboard.summary import hparams

        self._event = Event
        self._summary = Summary
        name = (
            f"events.out.tfevents.{time.time():010.0f}.{socket.gethostname()}.{os.getpid()}"
            f".{next(_NUMBERS):06d}"  # TensorBoard reads the files in the order of their names
        )
        self._file = TelemetryFile(run.path / name)
        self._records = RecordWriter(self._file)
        self._write(file_version="brain.Event:2")
        # makes TensorBoard drop what earlier files say of this step and later ones
        self._write(step=run.step, session_log=SessionLog(status=SessionLog.START))
        self.last: Mapping[str, int] = dict.fromkeys(KINDS, run.step - 1)
        for part in hparams(dict(run.parameters), {"train/loss": 0.0}):
            self._write(step=0, summary=part)

    def add(self, record: Mapping[str, Any]) -> None:
        values = [
            self._summary.Value(tag=tag, simple_value=value)
            for tag, value in scalars(record).items()
        ]
        self._write(step=record["step"], summary=self._summary(value=values))

    def close(self, ended: Ended, summary: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard.summary import text

        for name, value in summary.items():
            self._write(step=0, summary=text(name, str(value)))
        self._file.close()

    def _write(self, **fields: Any) -> None:
        self._records.write(self._event(wall_time=time.time(), **fields).SerializeToString())
        self._file.flush()  # a killed process loses nothing
