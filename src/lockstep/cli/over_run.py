"""What `lockstep evaluate` and `lockstep predict` share: find the run's checkpoint, start the
ranks, read what they found.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from lockstep.cli import latest
from lockstep.cli import nodes as many
from lockstep.cli.arguments import task_of
from lockstep.config.settings import Config, Settings
from lockstep.errors import UsageError

TaskName = Annotated[
    str,
    typer.Argument(
        metavar="TASK", help="digits, text, or a Python file whose task() returns a lockstep.Task."
    ),
]
Run = Annotated[
    Path,
    typer.Option(
        metavar="DIR", help="The run directory of `lockstep train`; latest: the newest under runs/."
    ),
]
Workers = Annotated[
    int | None,
    typer.Option(
        "--workers", "-n", show_default=False, help="Ranks on this host; default: the GPUs, else 1."
    ),
]
Best = Annotated[
    bool, typer.Option("--best", help="The checkpoint with the best metric, not the newest.")
]
JsonFile = Annotated[
    Path | None,
    typer.Option("--json", metavar="FILE", show_default=False, help="Also write it as JSON."),
]


def answer(
    what: str,
    task: str,
    run: Path,
    workers: int | None,
    best: bool,
    override: Mapping[str, str],
    config: Config,
    out: Path | None,
    ray: str | None = None,
) -> dict[str, Any]:
    """What rank 0 has to say; the command ends here with the ranks' own exit code where they
    failed.

    `ray`: the address of a cluster, whose nodes all see the run directory.
    """
    from lockstep.cli.hardware import fitted
    from lockstep.launcher.rank import Target
    from lockstep.launcher.supervise import supervise
    from lockstep.training.inference.apply import InferenceJob
    from lockstep.training.resolve import located

    place, overrides = task_of(task, override)
    run = latest.existing(run)
    trained = Settings.read(run)
    overrides = {**trained.overrides, **overrides}
    located(task, overrides)
    settings = Settings(
        task=place,
        overrides=overrides,
        workers=1 if workers is None else workers,
        device=config.device,
        loader_workers=config.loader_workers,
    )
    folder = _checkpoint(run, best=best)
    if ray is None:
        settings = fitted(settings, count_workers=workers is None)
    else:
        many.ranks_on_ray(workers)
    with TemporaryDirectory(
        prefix="lockstep-" if ray is None else ".answer-",
        dir=None if ray is None else run.absolute(),
    ) as scratch:
        file = Path(scratch) / "answer.json"
        job = InferenceJob(
            what=what,  # type: ignore[arg-type]  # the two commands' names
            task=place,
            overrides=settings.overrides,
            checkpoint=str(folder.absolute()),
            answer=str(file),
            out=None if out is None else str(out.absolute()),
            device=settings.device,
            precision=trained.precision,
            loader_workers=config.loader_workers,
        )
        target = Target(
            module="lockstep.training.inference.apply", args=[job.as_text()], task=place
        )
        if ray is None:
            outcome = supervise(target, settings.workers, console="first")
        else:
            outcome = many.run_on_ray(
                ray, target, settings.workers, console="first", gpus=many.gpus_for(config.device)
            )
        if outcome.exit_code:
            raise typer.Exit(outcome.exit_code)
        if not file.exists():
            raise UsageError("task-ended-its-process", task=task)
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return {**found, "checkpoint": str(folder)}


def first_words(found: dict[str, Any], best: bool) -> str:
    """The line's beginning: what ran, on what."""
    samples, workers = found["samples"], found["workers"]
    kind = "best" if best else "newest"
    counts = f"{samples} sample{'s' * (samples != 1)}, {workers} worker{'s' * (workers != 1)}"
    return f"{found['task']}: {counts}, {kind} checkpoint (step {found['step']})"


def write_json(file: Path | None, found: Any) -> None:
    """As --json asks, nan and infinities as text. Raises UsageError where the file cannot be
    written.
    """
    if file is None:
        return
    from lockstep.training.metrics import finite

    try:
        file.write_text(json.dumps(finite(found), indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError("cannot-write", name="--json", file=file, reason=error.strerror) from None


def _checkpoint(run: Path, *, best: bool) -> Path:
    from lockstep.checkpoints import files, folders

    folder = files.best(run / "checkpoints") if best else folders.newest(run / "checkpoints")
    if folder is None and best:
        raise UsageError("no-best-checkpoint", run=run)
    if folder is None:
        raise UsageError("no-checkpoint", run=run)
    return folder
