"""`lockstep evaluate`: a run's weights on its task's eval_data, each sample once."""

from __future__ import annotations

from lockstep.cli import over_run


def evaluate(
    task: over_run.TaskName,
    run: over_run.Run,
    workers: over_run.Workers = None,
    best: over_run.Best = False,
    override: over_run.Override = None,
    device: over_run.DeviceName = "auto",
    loader_workers: over_run.LoaderWorkers = 0,
    json: over_run.JsonFile = None,
) -> None:
    """Evaluate a run's newest (or best) checkpoint on the task's eval_data.

    Every sample counts once, and the number of ranks does not change the result. Prints each metric, then one line.
    """
    found = over_run.answer("evaluate", task, run, workers, best, override, device, loader_workers, out=None)
    over_run.write_json(json, found)
    metrics: dict[str, float] = found["metrics"]
    width = max(map(len, metrics))
    for name, value in metrics.items():
        print(f"{name:<{width}}  {value!r}")
    print(" | ".join([over_run.first_words(found, best), *(f"{name} {value:.4f}" for name, value in metrics.items())]))
