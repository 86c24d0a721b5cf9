"""`lockstep predict`: a run's model on its task's eval_data, one row a sample, to a file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lockstep.cli import latest, over_run
from lockstep.cli import nodes as many
from lockstep.cli.options import Only
from lockstep.config.launching import Cluster, RunChoice
from lockstep.config.settings import Config

COMMAND = many.Command


def predict(
    task: over_run.TaskName,
    run: over_run.Run,
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
    workers: over_run.Workers = None,
    best: over_run.Best = False,
    json: over_run.JsonFile = None,
) -> None:
    """Write what a run's newest (or best) checkpoint predicts for the task's eval_data, in its
    order.

    The number of ranks does not change the file, and no rank holds more than its own rows.
    """
    from lockstep.training.inference.apply import check_out

    run = latest.run_of(run)
    file = check_out(run / "predictions.npy" if out is None else out)
    found = over_run.answer(
        "predict", task, run, workers, best, choice.overrides, config, out=file, ray=cluster.ray
    )
    over_run.write_json(json, found)
    print(f"{over_run.first_words(found, best)} | predictions in {file}")
