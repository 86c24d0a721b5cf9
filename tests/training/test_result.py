"""The last line, as scripts read it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import nn

from lockstep.training.result import Result, last_line, read


def result(**changes: Any) -> Result:
    fields: dict[str, Any] = {
        "task": "digits",
        "model": nn.Linear(1, 1),
        "metrics": {"accuracy": 0.98888, "loss": 0.1},
        "best": None,
        "loss": 0.25,
        "headline": ("accuracy", 0.98888),
        "epochs": 12,
        "steps": 276,
        "workers": 2,
        "update": "replicated",
        "reduce": "native",
        "seconds": 5.0,
        "stopped_early": None,
        "sha256": "ab" * 32,
        "run": Path("runs/x"),
        "checkpoint": Path("runs/x/checkpoints/step-0000276"),
    }
    return Result(**{**fields, **changes})


def test_the_last_line(tmp_path: Path) -> None:
    line = last_line(result().as_json())
    assert (
        line == "digits: 12 epochs, 276 steps, 2 workers, replicated, native | accuracy 0.9889 |"
        f" weights sha256 {'ab' * 32}"
    )
    # no epoch is counted where training ends inside the first
    inside = last_line(result(epochs=0, steps=6).as_json())
    assert inside.startswith("digits: 6 steps, 2 workers, replicated")
    # one of each, and a loss that is no number
    one = result(epochs=1, steps=1, workers=1, headline=("loss", float("nan"))).as_json()
    line = last_line(one)
    assert line.startswith("digits: 1 epoch, 1 step, 1 worker, replicated, native | loss nan |")
    written = {**one, "headline": {"name": "loss", "value": "nan"}}
    (tmp_path / "result.json").write_text(json.dumps(written))
    assert last_line(read(tmp_path / "result.json")) == line


def test_paths_are_relative_to_the_run() -> None:
    assert result().as_json()["checkpoint"] == "checkpoints/step-0000276"
    assert result(run=None, checkpoint=None).as_json()["checkpoint"] is None
