"""`lockstep evaluate` and `lockstep predict`: apply a run's weights to its task's eval_data, each
sample once. evaluate prints metrics; predict writes one row per sample to a file.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Literal

import typer

from lockstep.cli import nodes
from lockstep.cli.arguments import (
    JsonFile,
    TaskName,
    Workers,
    answer_of,
    existing_run,
    fitted,
    run_of,
    task_of,
)
from lockstep.cli.choices import Cluster, RunChoice
from lockstep.cli.completion import runs
from lockstep.cli.options import Only
from lockstep.config.settings import Config, Settings
from lockstep.data.windows import counted
from lockstep.errors import UsageError
from lockstep.tools.timing.output_files import write_json

COMMAND = nodes.Command
Run = Annotated[
    Path,
    typer.Option(
        metavar="DIR",
        autocompletion=runs,
        help="Run directory of `lockstep train`. latest is the newest under runs/.",
    ),
]
Best = Annotated[
    bool,
    typer.Option("--best", help="Use the checkpoint with the best metric. Default: the newest."),
]


def evaluate(
    task: TaskName,
    run: Run,
    config: Annotated[Config, Only("device", "loader_workers")],
    choice: Annotated[RunChoice, Only("overrides")],
    cluster: Annotated[Cluster, Only("ray")],
    workers: Workers = None,
    best: Best = False,
    json: JsonFile = None,
) -> None:
    """Evaluate the newest (or best) checkpoint of a run on the task's eval_data.

    Every sample counts once, and the number of ranks does not change the result. It prints each
    metric, and then a summary in one line.
    """
    applied = AppliedCheckpoint("evaluate", task, existing_run(run), workers, best)
    answer = applied.answer(config, choice, cluster)
    write_json(json, answer)
    metrics: dict[str, float] = answer["metrics"]
    width = max(map(len, metrics))
    line = [applied.first_words(answer)]
    for name, value in metrics.items():
        print(f"{name:<{width}}  {value!r}")
        line.append(f"{name} {value:.4f}")
    print(" | ".join(line))


@dataclass(frozen=True, slots=True)
class AppliedCheckpoint:
    """An evaluation or prediction with a checkpoint of a run, on a task's eval_data."""

    command: Literal["evaluate", "predict"]
    task: str
    run: Path
    workers: int | None
    best: bool
    out: Path | None = None
    """The file of predictions."""

    def answer(self, config: Config, choice: RunChoice, cluster: Cluster) -> dict[str, Any]:
        """Return rank 0's answer. All nodes of a Ray cluster must see the run directory."""
        trained = Settings.read(self.run)
        task, overrides = task_of(self.task, {**trained.overrides, **choice.overrides})
        settings = Settings(
            task=task,
            overrides=overrides,
            workers=1 if self.workers is None else self.workers,
            device=config.device,
            loader_workers=config.loader_workers,
            precision=trained.precision,
        )
        folder = self._checkpoint()
        if cluster.ray is None:
            settings = fitted(settings, count_workers=self.workers is None)
        else:
            nodes.ranks_on_ray(self.workers)
        return {**self._apply(settings, folder, cluster.ray), "checkpoint": str(folder)}

    def _apply(self, settings: Settings, folder: Path, ray: str | None) -> dict[str, Any]:
        from lockstep.launcher.rank import Target
        from lockstep.launcher.supervise import supervise
        from lockstep.training.inference.apply import InferenceJob

        seen_by_all = None if ray is None else self.run.absolute()
        with TemporaryDirectory(prefix=".lockstep-", dir=seen_by_all) as scratch:
            file = Path(scratch) / "answer.json"
            job = InferenceJob(
                command=self.command,
                task=settings.task,
                overrides=settings.overrides,
                checkpoint=str(folder.absolute()),
                answer=str(file),
                out=None if self.out is None else str(self.out.absolute()),
                device=settings.device,
                precision=settings.precision,
                loader_workers=settings.loader_workers,
            )
            target = Target(
                module="lockstep.training.inference.apply",
                args=[job.as_text()],
                task=settings.task,
            )
            if ray is None:
                outcome = supervise(target, settings.workers, console="first")
            else:
                gpus = nodes.gpus_for(settings.device)
                outcome = nodes.run_on_ray(
                    ray, target, settings.workers, settings.workers, gpus=gpus
                )
            return answer_of(outcome, file, self.task)

    def _checkpoint(self) -> Path:
        from lockstep.checkpoints import files, folders

        directory = self.run / "checkpoints"
        folder = files.best(directory) if self.best else folders.newest(directory)
        if folder is None:
            raise UsageError("no-best-checkpoint" if self.best else "no-checkpoint", run=self.run)
        return folder

    def first_words(self, answer: dict[str, Any]) -> str:
        """Return the beginning of the line: task, samples, workers and checkpoint."""
        samples = counted(answer["samples"], "sample")
        workers = counted(answer["workers"], "worker")
        kind = "best" if self.best else "newest"
        step = f"step {answer['step']}"
        if answer["averaged"]:
            step += ", averaged weights"
        return f"{answer['task']}: {samples}, {workers}, {kind} checkpoint ({step})"


def predict(
    task: TaskName,
    run: Run,
    config: Annotated[Config, Only("device", "loader_workers")],
    choice: Annotated[RunChoice, Only("overrides")],
    cluster: Annotated[Cluster, Only("ray")],
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="The .npy file to write. Default: DIR/predictions.npy.",
        ),
    ] = None,
    workers: Workers = None,
    best: Best = False,
    json: JsonFile = None,
) -> None:
    """Write the predictions of a run's newest (or best) checkpoint for the task's eval_data.

    The rows are in the order of eval_data. The number of ranks does not change the file. Ranks write
    their rows to it as they compute them.
    """
    from lockstep.training.inference.apply import check_out

    file = check_out(run_of(run) / "predictions.npy" if out is None else out)
    applied = AppliedCheckpoint("predict", task, existing_run(run), workers, best, file)
    answer = applied.answer(config, choice, cluster)
    write_json(json, answer)
    print(f"{applied.first_words(answer)} | predictions in {file}")
