"""`lockstep evaluate`: a run's weights on its task's eval_data, each sample once."""

from __future__ import annotations

from typing import Annotated

from lockstep.cli import nodes as many
from lockstep.cli import over_run
from lockstep.cli.options import Only
from lockstep.config.launching import Cluster, RunChoice
from lockstep.config.settings import Config

COMMAND = many.Command


def evaluate(
    task: over_run.TaskName,
    run: over_run.Run,
    config: Annotated[Config, Only("device", "loader_workers")],
    choice: Annotated[RunChoice, Only("overrides")],
    cluster: Annotated[Cluster, Only("ray")],
    workers: over_run.Workers = None,
    best: over_run.Best = False,
    json: over_run.JsonFile = None,
) -> None:
    """Evaluate a run's newest (or best) checkpoint on the task's eval_data.

    Every sample counts once, and the number of ranks does not change the result. Prints each
    metric, then one line.
    """
    found = over_run.answer(
        "evaluate", task, run, workers, best, choice.overrides, config, out=None, ray=cluster.ray
    )
    over_run.write_json(json, found)
    metrics: dict[str, float] = found["metrics"]
    width = max(map(len, metrics))
    for name, value in metrics.items():
        print(f"{name:<{width}}  {value!r}")
    print(
        " | ".join(
            [
                over_run.first_words(found, best),
                *(f"{name} {value:.4f}" for name, value in metrics.items()),
            ]
        )
    )
