"""Apply a finished run's model to its task's eval_data: what `lockstep evaluate` and `lockstep
predict` do on every rank.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Set
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from lockstep.config.settings import Device
from lockstep.errors import TaskError, UsageError


@dataclass(frozen=True, kw_only=True, slots=True)
class InferenceJob:
    """What the command sends to its ranks, as JSON."""

    command: Literal["evaluate", "predict"]
    task: str
    """A bundled name or the path of a file."""
    overrides: Mapping[str, str] = field(default_factory=dict)
    checkpoint: str
    """The folder of the checkpoint."""
    answer: str
    """File into which rank 0 writes what the command prints."""
    out: str | None = None
    """File of the predictions."""
    device: Device = "auto"
    precision: str | None = None
    """None: the precision of the task."""
    loader_workers: int = 0

    def as_text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> InferenceJob:
        return cls(**json.loads(text))


def apply(job: InferenceJob) -> None:
    """Do the job on this rank, in a world that is opened for it, with the averaged weights if the
    checkpoint has them. Rank 0 writes {"samples", "workers", "metrics" or "out"} as the answer.
    """
    from lockstep.checkpoints import files
    from lockstep.checkpoints.pieces import read_all
    from lockstep.step.forward import Forward
    from lockstep.training.build import model_of
    from lockstep.training.inference.evaluation import Evaluation
    from lockstep.training.inference.prediction import run
    from lockstep.training.opening import matmul_precision, world_for
    from lockstep.training.resolve import resolve

    task = resolve(job.task, job.overrides)
    if task.eval_data is None:
        raise TaskError("no-eval-data", task=task.name, what=job.command)
    precision: Any = job.precision or task.precision
    with world_for(None, job.device) as world:
        model = model_of(task)
        checkpoint = files.read(Path(job.checkpoint))
        state = checkpoint.state
        saved = checkpoint.average() if checkpoint.averaged else checkpoint.model()
        source = f"checkpoint {job.checkpoint} (of task {state.get('task')!r})"
        fill(model, read_all(saved), source, f"task {task.name!r}")
        forward = Forward(model.to(world.device), task, precision, world.device)
        evaluation = Evaluation(task, forward, world, loader_workers=job.loader_workers)
        answer = {
            "task": task.name,
            "samples": evaluation.rows.total,
            "workers": world.size,
            "step": state.get("step"),
            "averaged": checkpoint.averaged,
        }
        with matmul_precision(precision):
            if job.out is None:
                answer["metrics"] = evaluation()
            else:
                file = run(forward, evaluation.rows, world, seed=task.seed, out=Path(job.out))
                answer["out"] = str(file)
        if world.rank == 0:
            Path(job.answer).write_text(json.dumps(answer), encoding="utf-8")


def check_out(path: Path) -> Path:
    """Return the path if predictions can be written there. Raises UsageError for another extension
    or a folder.
    """
    if path.suffix != ".npy":
        raise UsageError("wrong-ending", option="out", file=str(path), endings=(".npy",))
    if path.is_dir():
        raise UsageError("cannot-write", name="out", file=str(path), reason="it is a folder")
    return path


def fill(model: Any, saved: Mapping[str, Any], source: str, target: str) -> None:
    """Load all of a checkpoint's weights, or none. Raises TaskError, with names of weights, if they
    are another model's.
    """
    from lockstep.checks.identity import weights

    tensors = weights(model)
    common = tensors.keys() & saved.keys()
    wrong = {
        "missing": tensors.keys() - common,
        "unexpected": saved.keys() - common,
        "of another shape": {name for name in common if tensors[name].shape != saved[name].shape},
    }
    differences = "; ".join(f"{kind}: {_listed(names)}" for kind, names in wrong.items() if names)
    if differences:
        raise TaskError(
            "checkpoint-of-another-model", checkpoint=source, task=target, differences=differences
        )
    for name, tensor in tensors.items():
        tensor.copy_(saved[name])


def _listed(names: Set[str], most: int = 4) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(sorted(names)[:most]) + more


if __name__ == "__main__":
    import sys

    job = InferenceJob.from_text(sys.argv[1])
    if sys.argv[2:]:  # the task's path on this node, if it differs
        job = replace(job, task=sys.argv[2])
    apply(job)
