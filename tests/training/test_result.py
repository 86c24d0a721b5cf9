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
        "headline": ("accuracy", 0.98888),
        "run": Path("runs/x"),
        "checkpoint": Path("runs/x/checkpoints/step-0000276"),
        "sha256": "ab" * 32,
    }
    fields |= {"epochs": 12, "steps": 276, "workers": 2, "seconds": 5.0, "loss": 0.25}
    fields |= {"update": "replicated", "reduce": "native", "best": None, "stopped_early": None}
    return Result(**{**fields, **changes})


def test_the_last_line(tmp_path: Path) -> None:
    line = last_line(result().as_json())
    assert line.startswith("digits: 12 epochs, 276 steps, 2 workers, replicated, native | accuracy")
    assert line.endswith(f" | weights sha256 {'ab' * 32}")
    # no epoch is counted where training ends inside the first, and a loss may be no number
    one = result(epochs=0, steps=1, workers=1, headline=("loss", float("nan"))).as_json()
    line = last_line(one)
    assert line.startswith("digits: 1 step, 1 worker, replicated, native | loss nan |")
    written = {**one, "headline": {"name": "loss", "value": "nan"}}
    (tmp_path / "result.json").write_text(json.dumps(written))
    assert last_line(read(tmp_path / "result.json")) == line
    assert result().as_json()["checkpoint"] == "checkpoints/step-0000276"
