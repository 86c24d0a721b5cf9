"""Compare two finished runs by their files: the numbers of every step and evaluation, and the
weights. Every bit counts.

Times, and values that follow from the number of workers, may differ and are not compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lockstep.checkpoints import files
from lockstep.checkpoints.folders import newest
from lockstep.data.windows import counted
from lockstep.errors import UsageError
from lockstep.tools.recorded import read
from lockstep.training.resolve import short_name
from lockstep.training.run_directory import METRICS, RESULT

_STEP = ("loss", "weight", "lr")


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
        found = read(path)
        if found.state != "finished":
            raise UsageError("run-not-finished", run=path, missing=RESULT)
        if not found.whole:
            raise UsageError(
                "cannot-read",
                name="run file",
                file=path / METRICS,
                reason="it is not as `lockstep train` wrote it",
            )
        checkpoint = newest(path / "checkpoints")
        if checkpoint is None:
            raise UsageError("no-checkpoint", run=path)
        return cls(
            path=path,
            task=short_name(found.settings.task),
            steps={each["step"]: {name: each.get(name) for name in _STEP} for each in found.steps},
            evaluations={each["step"]: each["metrics"] for each in found.evaluations},
            checkpoint=checkpoint,
        )


def differences(one: Path, other: Path) -> list[str]:
    """Describe the first step, the first evaluation and the first parameter that differ. The list
    is empty if the runs are equal.

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
    """Describe what was compared, for a run that is equal to the other."""
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
            f"{what} {alone[0]} is in the {which} run only ({len(ours)} and {len(theirs)} in all)"
        )
    return None


def _weights(one: Path, other: Path) -> str | None:
    ours, theirs = files.read(one).tensors, files.read(other).tensors
    first = next(tensor_differences(ours, theirs, ("the first run", "the second run")), None)
    where = " and ".join(dict.fromkeys([one.name, other.name]))
    return first and f"weights ({where}): {first}"


def tensor_differences(
    ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], sides: tuple[str, str]
) -> Iterator[str]:
    """Yield a sentence for each name whose tensors differ in any bit."""
    for name in sorted(ours.keys() | theirs.keys()):
        one, other = ours.get(name), theirs.get(name)
        if one is None or other is None:
            yield f"{name} is only in {sides[one is None]}"
        elif (one.shape, one.dtype) != (other.shape, other.dtype):
            kinds = (f"{each.dtype} {list(each.shape)}" for each in (one, other))
            yield f"{name} is {' and '.join(kinds)}"
        elif not torch.equal(_bits(one), _bits(other)):
            count = int((_bits(one) != _bits(other)).reshape(one.numel(), -1).any(1).sum())
            wide = torch.complex128 if one.is_complex() else torch.float64
            gap = (one.to(wide) - other.to(wide)).abs().max().item()
            yield f"{name} differs in {count} of {one.numel()} elements, by {gap:.3g} at most"


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
