"""`lockstep predict`: a run's model on its task's eval_data, one row a sample, to a file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lockstep.cli import latest, over_run


def predict(
    task: over_run.TaskName,
    run: over_run.Run,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", show_default=False, help="Ends in .npy or .parquet; default: DIR/predictions.npy.")
    ] = None,
    workers: over_run.Workers = None,
    best: over_run.Best = False,
    override: over_run.Override = None,
    device: over_run.DeviceName = "auto",
    loader_workers: over_run.LoaderWorkers = 0,
    json: over_run.JsonFile = None,
) -> None:
    """Write what a run's newest (or best) checkpoint predicts for the task's eval_data, in its order.

    The number of ranks does not change the file, and no rank holds more than its own rows.
    """
    from lockstep.inference import out_file

    run = latest.run_of(run)
    file = out_file.check(run / "predictions.npy" if out is None else out)
    found = over_run.answer("predict", task, run, workers, best, override, device, loader_workers, out=file)
    over_run.write_json(json, found)
    print(f"{over_run.first_words(found, best)} | predictions in {file}")
