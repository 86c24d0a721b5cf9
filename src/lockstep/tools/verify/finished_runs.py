"""Two finished runs, by what they left on disk: the numbers of every step and evaluation, and the
weights. Every bit counts.

What may differ between two runs of the same training is left alone: times, and what follows from
the number of workers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lockstep.checkpoints import files
from lockstep.checkpoints.folders import newest
from lockstep.config.settings import Settings
from lockstep.data.windows import counted
from lockstep.errors import UsageError
from lockstep.training.resolve import short_name
from lockstep.training.run_directory import METRICS, RESULT

_STEP = ("loss", "weight", "lr")


@dataclass(frozen=True, slots=True)
class FinishedRun:
    """What is compared."""

    path: Path
    task: str
    steps: Mapping[int, Mapping[str, Any]]
    evaluations: Mapping[int, Mapping[str, Any]]
    """By the step after which they were made."""
    checkpoint: Path
    """The newest."""

    @classmethod
    def read(cls, path: Path) -> FinishedRun:
        """Raises UsageError where it is no run directory, its training has not ended, or a file
        is missing or broken.
        """
        task = short_name(Settings.read(path).task)
        if not (path / RESULT).exists():
            raise UsageError("run-not-finished", run=path, missing=RESULT)
        records = _records(path / METRICS)
        checkpoint = newest(path / "checkpoints")
        if checkpoint is None:
            raise UsageError("no-checkpoint", run=path)
        steps, evaluations = (
            [each for each in records if each.get("kind") == kind] for kind in ("step", "evaluate")
        )
        numbers = {each["step"]: {name: each.get(name) for name in _STEP} for each in steps}
        return cls(
            path, task, numbers, {each["step"]: each["metrics"] for each in evaluations}, checkpoint
        )


def differences(one: Path, other: Path) -> list[str]:
    """In sentences: the first step, the first evaluation, and the first parameter that differ.
    Empty: the runs are equal.

    Raises UsageError for runs that cannot be compared.
    """
    ours, theirs = FinishedRun.read(one), FinishedRun.read(other)
    if ours.task != theirs.task:
        raise UsageError("runs-of-two-tasks", one=one, other=other, tasks=[ours.task, theirs.task])
    found = [
        _first("step", ours.steps, theirs.steps),
        _first("evaluation after step", ours.evaluations, theirs.evaluations),
        _weights(ours.checkpoint, theirs.checkpoint),
    ]
    return list(filter(None, found))


def summary(run: Path) -> str:
    """What was compared of a run that has an equal."""
    found = FinishedRun.read(run)
    steps = counted(len(found.steps), "step")
    evaluations = counted(len(found.evaluations), "evaluation")
    return f"{steps}, {evaluations} and the weights of {found.checkpoint.name}"


def _first(
    what: str, ours: Mapping[int, Mapping[str, Any]], theirs: Mapping[int, Mapping[str, Any]]
) -> str | None:
    for number in sorted(ours.keys() & theirs.keys()):
        one, other = ours[number], theirs[number]
        names = [name for name in dict.fromkeys([*one, *other]) if one.get(name) != other.get(name)]
        if names:
            shown = "; ".join(f"{name} {one.get(name)} and {other.get(name)}" for name in names)
            return f"{what} {number}: {shown}"
    alone = sorted(ours.keys() ^ theirs.keys())
    if alone:
        which = "first" if alone[0] in ours else "second"
        return (
            f"{what} {alone[0]} is there in the {which} run only ({len(ours)} and {len(theirs)} in"
            " all)"
        )
    return None


def _weights(one: Path, other: Path) -> str | None:
    ours, theirs = files.read(one).tensors, files.read(other).tensors
    for name in sorted(ours.keys() | theirs.keys()):
        if name not in ours or name not in theirs:
            return (
                f"weights: {name} is there in the {'first' if name in ours else 'second'} run only"
            )
        sentence = _tensors(name, ours[name], theirs[name])
        if sentence:
            return f"weights ({' and '.join(dict.fromkeys([one.name, other.name]))}): {sentence}"
    return None


def _tensors(name: str, one: Tensor, other: Tensor) -> str | None:
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return f"{name} is {one.dtype} {list(one.shape)} and {other.dtype} {list(other.shape)}"
    if torch.equal(_bits(one), _bits(other)):
        return None
    differing = (_bits(one) != _bits(other)).reshape(one.numel(), -1).any(1)
    largest = (one.double() - other.double()).abs().max().item()
    return (
        f"{name} differs in {int(differing.sum())} of {one.numel()} elements, by {largest:.3g} at"
        " most"
    )


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _records(file: Path) -> list[dict[str, Any]]:
    try:
        records = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as error:
        raise UsageError("cannot-read", name="run file", file=file, reason=error) from None
    return [record for record in records if isinstance(record, dict)]
