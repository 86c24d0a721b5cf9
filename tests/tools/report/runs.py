"""Run directories made up, as `lockstep train` leaves them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lockstep.config.settings import Settings
from tests.training.synthetic import lines, noisy, planted, write

MEMORY = {
    "kind": "memory",
    "parameters": 2**20,
    "gradients": 2**20,
    "optimizer": 2**21,
    "peak": 2**28,
}
START = "global batch 64 = 8 micro-batches x 8; 4 ranks x 2; gradients by native, replicated update"


def metrics(
    steps: int = 40, *, every: int = 20, more: Iterable[Mapping[str, Any]] = ()
) -> list[Mapping[str, Any]]:
    """A start, steps, evaluations."""
    start = {"kind": "event", "event": "start", "line": START, "workers": 4, "epochs": 2}
    records: list[Mapping[str, Any]] = [{**start, "steps": steps}]
    for step in range(1, steps + 1):
        record = {"kind": "step", "step": step, "epoch": 1, "loss": 2 / step, "weight": 64.0}
        records.append({**record, "lr": 0.1, "samples_per_s": 900.0 + step})
        if step % every == 0:
            values = {"accuracy": 1 - 1 / step, "loss": 3 / step}
            evaluation = {"kind": "evaluate", "step": step, "epoch": 1, "seconds": 0.1}
            records.append({**evaluation, "metrics": values})
    return [*records, *more]


def anatomy(workers: int = 4, steps: int = 40) -> dict[int, list[dict[str, Any]]]:
    """The loader of the last rank is slow."""
    found = lines(workers, steps, planted(workers - 1, "data", 0.05), noisy(1, 0.3), spans=True)
    for each in found.values():
        each += [
            MEMORY,
            {"kind": "pause", "what": "evaluate", "step": steps, "seconds": 0.1},
            {"kind": "end", "step": steps},
        ]
    return found


def make(
    run: Path,
    *,
    records: Iterable[Mapping[str, Any]] | None = None,
    parts: Mapping[int, list[dict[str, Any]]] | None = None,
    finished: bool = True,
    **asked: Any,
) -> Path:
    """A run of 4 ranks in `run`; `parts`: its anatomy, {} for none."""
    run.mkdir(parents=True, exist_ok=True)
    Settings(**{"task": "digits", "workers": 4, "epochs": 2, **asked}).write(run)
    rows = metrics() if records is None else records
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (run / "lock").touch()
    if finished:
        result: dict[str, Any] = {"task": "digits", "epochs": 2, "steps": 40, "workers": 4}
        result |= {"seconds": 5.4, "sha256": "ab" * 32}
        result["headline"] = {"name": "accuracy", "value": 0.975}
        (run / "result.json").write_text(json.dumps(result))
    write(run, anatomy() if parts is None else parts)
    return run
