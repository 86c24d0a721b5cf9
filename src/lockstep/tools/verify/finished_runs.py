"""Compare two finished runs by their files: the numbers of every step and evaluation, and the
weights. Every bit counts.

Times, and values that follow from the number of workers, may differ and are not compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lockstep.checkpoints import files
from lockstep.errors import UsageError
from lockstep.runs import StepRecord, read
from lockstep.tools.timing.output_files import counted


@dataclass(frozen=True, slots=True)
class FinishedRun:
    """The values of a run that are compared."""

    path: Path
    task: str
    steps: Mapping[int, Mapping[str, Any]]
    evaluations: Mapping[int, Mapping[str, Any]]
    """The metrics of each evaluation, by the step it followed."""
    checkpoint: Path
    """The newest checkpoint."""

    @classmethod
    def read(cls, path: Path) -> FinishedRun:
        """Read a run directory. Raise UsageError if its training has not ended, or if a file is
        missing or broken.
        """
        run = read(path)
        if run.state != "finished":
            raise UsageError("run-not-finished", run=path, missing="result.json")
        if not run.complete:
            raise UsageError(
                "cannot-read",
                name="run file",
                file=path / "metrics.jsonl",
                reason="it is not as `lockstep train` wrote it",
            )
        if not run.checkpoints:
            raise UsageError("no-checkpoint", run=path)
        return cls(
            path=path,
            task=Path(run.settings.task).stem,
            steps={record.step: _values_of(record) for record in run.steps},
            evaluations={record.step: record.metrics for record in run.evaluations},
            checkpoint=run.checkpoints[-1].path,
        )


def _values_of(record: StepRecord) -> dict[str, str]:
    """Return the compared values of a step as texts: nan is equal to itself."""
    return {"loss": repr(record.loss), "weight": repr(record.weight), "lr": repr(record.lr)}


@dataclass(frozen=True, slots=True)
class Compared:
    """How two runs differ."""

    sentences: Sequence[str]
    """The first step, the first evaluation and the first parameter that differ; empty if the runs
    are equal.
    """
    step: int | None
    """The first step that differs and that both have."""


def differences(one: Path, other: Path) -> Compared:
    """Compare two finished runs. Raises UsageError for runs that cannot be compared."""
    left = FinishedRun.read(one)
    right = FinishedRun.read(other)
    if left.task != right.task:
        raise UsageError("runs-of-two-tasks", one=one, other=other, tasks=[left.task, right.task])
    sentences = [
        _first("step", left.steps, right.steps),
        _first("evaluation after step", left.evaluations, right.evaluations),
        _weights(left.checkpoint, right.checkpoint),
    ]
    step = _first_step(left.steps, right.steps)
    return Compared(list(filter(None, sentences)), step)


def summary(run: Path) -> str:
    """Describe what was compared, for a run that is equal to the other."""
    finished = FinishedRun.read(run)
    steps = counted(len(finished.steps), "step")
    evaluations = counted(len(finished.evaluations), "evaluation")
    return f"{steps}, {evaluations} and the weights of {finished.checkpoint.name}"


def _first(
    kind: str, left: Mapping[int, Mapping[str, Any]], right: Mapping[int, Mapping[str, Any]]
) -> str | None:
    step = _first_step(left, right)
    if step is not None:
        return f"{kind} {step}: {'; '.join(_values(left[step], right[step]))}"
    alone = sorted(left.keys() ^ right.keys())
    if not alone:
        return None
    run = "first" if alone[0] in left else "second"
    counts = f"({len(left)} and {len(right)} in all)"
    return f"{kind} {alone[0]} is in the {run} run only {counts}"


def _first_step(
    left: Mapping[int, Mapping[str, Any]], right: Mapping[int, Mapping[str, Any]]
) -> int | None:
    for step in sorted(left.keys() & right.keys()):
        if _values(left[step], right[step]):
            return step
    return None


def _values(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return the values that differ, each with its name."""
    shown = []
    for name in dict.fromkeys([*one, *other]):
        if one.get(name) != other.get(name):
            shown.append(f"{name} {one.get(name)} and {other.get(name)}")
    return shown


def _weights(one: Path, other: Path) -> str | None:
    left = files.read(one).tensors
    right = files.read(other).tensors
    names = " and ".join(dict.fromkeys([one.name, other.name]))
    first = next(tensor_differences(left, right, ("the first run", "the second run")), None)
    return first and f"weights ({names}): {first}"


def tensor_differences(
    left: Mapping[str, Tensor], right: Mapping[str, Tensor], sides: tuple[str, str]
) -> Iterator[str]:
    """Yield a sentence for each name whose tensors differ in any bit."""
    for name in sorted(left.keys() | right.keys()):
        one = left.get(name)
        other = right.get(name)
        if one is None or other is None:
            yield f"{name} is only in {sides[one is None]}"
        elif one.shape != other.shape or one.dtype != other.dtype:
            kinds = [f"{tensor.dtype} {list(tensor.shape)}" for tensor in (one, other)]
            yield f"{name} is {' and '.join(kinds)}"
        elif not torch.equal(_bits(one), _bits(other)):
            differing = (_bits(one) != _bits(other)).any(1)
            count = f"{int(differing.sum())} of {one.numel()} elements"
            wide = torch.complex128 if one.is_complex() else torch.float64
            gaps = (one.to(wide) - other.to(wide)).abs()
            yield f"{name} differs in {count}, by {gaps.max().item():.3g} at most"


def _bits(tensor: Tensor) -> Tensor:
    """Return the bytes of each element, as a row."""
    return tensor.contiguous().reshape(-1, 1).view(torch.uint8)
