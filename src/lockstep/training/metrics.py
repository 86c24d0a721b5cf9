"""metrics.jsonl: one JSON object a line, of kind step, evaluate or event. loggers.py passes the
numbers on.

step       step, epoch (both count from 1), loss (weighted, whole global batch, before the update),
           weight, samples_by_rank,
           lr (of the first parameter group), samples_per_s, bytes_sent (by rank 0 in this step);
           with `clip` also grad_norm (of the whole gradient, before clipping; not with a
           parameter server); with a parameter server also gradient_age (mean number of updates
           between the pull of the parameters and the use of their gradients). A parameter server
           gives one record per window, in the order of application, and bytes_sent counts since
           the previous record
evaluate   step, epoch, metrics (name -> value), seconds
event      event, and the fields that belong to it
"""

from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from itertools import starmap
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from lockstep.errors import LockstepError, LockstepWarning
from lockstep.runtime.disk import write_all, write_whole

_BUFFER = 2**16  # bytes


class MetricsFile:
    """Appends records to a file; each is complete as soon as it is written. Raises LockstepError,
    with the file's name, if that fails.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        with self._named():
            self._lines = file.open("ab", buffering=0)

    def write(self, record: Mapping[str, Any]) -> None:
        with self._named():
            line = json.dumps(finite(record), allow_nan=False) + "\n"
            write_all(self._lines.fileno(), line.encode())

    def close(self) -> None:
        self._lines.close()

    @contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise LockstepError(
                "metrics-not-written", file=str(self._file), reason=str(error.strerror)
            ) from error

    def __enter__(self) -> MetricsFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


SKIPPED = "step skipped"
LEFT_OUT = "step left out"
NOT_APPLIED = (SKIPPED, LEFT_OUT)
"""Events of steps whose update was not applied."""


def forget_after(metrics: Path, step: int, evaluated: int) -> None:
    """Remove from metrics.jsonl what will happen again: steps after `step`, also those that were
    skipped or left out, and evaluations after `evaluated`. Also remove incomplete lines.
    """
    if not metrics.exists():
        return
    remaining = []
    for line in metrics.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record: Any = json.loads(line)
        except ValueError:
            continue
        kind = record.get("event") or record.get("kind")
        last = {"step": step, "evaluate": evaluated, **dict.fromkeys(NOT_APPLIED, step)}.get(kind)
        if last is None or record["step"] <= last:
            remaining.append(line + "\n")
    write_whole(metrics, "".join(remaining))


def finite(value: Any) -> Any:
    """Return a value with nan and infinities, which JSON lacks, as texts that `float` reads.

    Args:
        value: a number, or a mapping or sequence of values.
    """
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {name: finite(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(part) for part in value]
    return value


class TelemetryFile:
    """Appends to `file` through one descriptor. A killed process loses what is still in the
    buffer. Training can do without the file: if a write fails, a warning names the file, and
    writing ends.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._waiting = bytearray()
        self._handle: int | None = None
        try:
            file.parent.mkdir(exist_ok=True)
            self._handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        except OSError as error:
            self._give_up(error)

    def write(self, data: bytes) -> None:
        self._waiting += data
        if len(self._waiting) > _BUFFER:
            self.flush()

    def flush(self) -> None:
        data = self._waiting
        self._waiting = bytearray()
        try:
            if self._handle is not None:
                write_all(self._handle, data)
        except OSError as error:
            self._give_up(error)

    def close(self) -> None:
        self.flush()
        self._end()

    def _give_up(self, error: OSError) -> None:
        self._end()
        warnings.warn(
            f"{self._file} cannot be written ({error.strerror}): training continues without it",
            LockstepWarning,
            stacklevel=3,
        )

    def _end(self) -> None:
        handle = self._handle
        self._handle = None
        if handle is not None:
            os.close(handle)


def typed(kind: Any, value: Any) -> Any:
    """Convert `value`, as JSON has it, to `kind`: a dataclass, whose fields with a default may be
    missing, a container of one, or a plain value.

    Raises ValueError, TypeError, KeyError or AttributeError if it does not fit. Numbers must be at
    least 0, unless they are Annotated.
    """
    origin = get_origin(kind)
    types = get_args(kind)
    if is_dataclass(kind):
        return _record(kind, value)
    if origin in (Union, UnionType):
        if value is None:
            return None
        if len(types) == 2:  # the other one is None
            return typed(types[0], value)
        if not isinstance(value, types):
            raise TypeError(f"{value!r} is no {kind}")
        return value
    if origin is tuple and types[-1] is not ...:
        return tuple(starmap(typed, zip(types, value, strict=True)))
    if origin in (tuple, Sequence):
        return tuple(typed(types[0], part) for part in value)
    if origin in (dict, Mapping):
        key_type, part_type = types
        parts = {}
        for text, part in value.items():
            key = int(text) if key_type is int else text
            parts[typed(key_type, key)] = typed(part_type, part)
        return parts
    if kind is str:
        return str(value)
    if isinstance(value, bool) != (kind is bool):
        raise TypeError(f"{value!r} is no {kind}")
    if not isinstance(value, int if kind is int else int | float) or not math.isfinite(value):
        raise ValueError(f"{value!r} is no number")
    if value < 0 and origin is not Annotated:
        raise ValueError(f"{value} is negative")
    return value if kind in (int, bool) else float(value)


def _record(kind: Any, value: Any) -> Any:
    annotations = _annotations(kind)
    arguments = {}
    for field in fields(kind):
        required = field.default is MISSING and field.default_factory is MISSING
        if required or field.name in value:
            arguments[field.name] = typed(annotations[field.name], value[field.name])
    return kind(**arguments)


@cache
def _annotations(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)
