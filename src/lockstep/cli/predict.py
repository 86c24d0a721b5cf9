"""`lockstep predict`: a run's model on its task's eval_data, one row a sample, to a file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lockstep.cli import nodes as many
from lockstep.cli.arguments import JsonFile, TaskName, Workers, existing_run, run_of
from lockstep.cli.evaluate import AppliedCheckpoint, Best, Run
from lockstep.cli.options import Only
from lockstep.config.launching import Cluster, RunChoice
from lockstep.config.settings import Config
from lockstep.tools.timing.output_files import write_json

COMMAND = many.Command


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
            show_default=False,
            help="Ends in .npy or .parquet; default: DIR/predictions.npy.",
        ),
    ] = None,
    workers: Workers = None,
    best: Best = False,
    json: JsonFile = None,
) -> None:
    """Write what a run's newest (or best) checkpoint predicts for the task's eval_data, in its
    order.

    The number of ranks does not change the file, and no rank holds more than its own rows.
    """
    from lockstep.training.inference.apply import check_out

    file = check_out(run_of(run) / "predictions.npy" if out is None else out)
    applied = AppliedCheckpoint("predict", task, existing_run(run), workers, best, file)
    found = applied.answer(config, choice, cluster)
    write_json(json, found)
    print(f"{applied.first_words(found)} | predictions in {file}")
