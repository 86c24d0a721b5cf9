"""metrics.jsonl: one JSON object a line, of kind step, evaluate or event; and the same numbers for TensorBoard where it is installed.

step       step, epoch (both count from 1), loss (weighted, whole global batch, before the update), weight, samples_by_rank,
           lr (of the first parameter group), samples_per_s, bytes_sent (by rank 0 in this step); with a parameter server gradient_age
           (updates that came while its gradients were computed and waited, on average); one record a window, in the order in which they were
           applied, and bytes_sent is since the record before
evaluate   step, epoch, metrics (name -> value), seconds
event      event, and what belongs to it
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any


class MetricsFile:
    """Appends records to a file, each complete as soon as it is written."""

    def __init__(self, file: Path) -> None:
        self._lines = file.open("a", buffering=1, encoding="utf-8")
        self._board = _tensorboard(file.parent)

    def write(self, record: Mapping[str, Any]) -> None:
        self._lines.write(json.dumps(finite(record), allow_nan=False) + "\n")
        if self._board is not None and "step" in record:
            self._board.add(_scalars(record), record["step"])

    def close(self) -> None:
        self._lines.close()
        if self._board is not None:
            self._board.close()

    def __enter__(self) -> MetricsFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class _Board:
    """TensorBoard's own writer. torch.utils.tensorboard would do, but takes seconds to import."""

    def __init__(self, directory: Path) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = Event, Summary
        self._writer = EventFileWriter(str(directory))

    def add(self, scalars: Mapping[str, float], step: int) -> None:
        values = [self._summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=self._summary(value=values)))

    def close(self) -> None:
        self._writer.close()


def _tensorboard(directory: Path) -> _Board | None:
    try:
        return _Board(directory)
    except ImportError:
        return None


def _scalars(record: Mapping[str, Any]) -> dict[str, float]:
    if record["kind"] == "evaluate":
        return {f"evaluate/{name}": value for name, value in record["metrics"].items()}
    return {f"train/{name}": record[name] for name in ("loss", "lr", "samples_per_s") if name in record}


def finite(value: Any) -> Any:
    """JSON has no nan and no infinity: they become "nan", "inf" and "-inf", which `float` reads."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {name: finite(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(part) for part in value]
    return value
