"""The last line, as scripts read it."""

from __future__ import annotations

import json
import re
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


def test_the_last_line() -> None:
    line = last_line(result().as_json())
    assert (
        line == "digits: 12 epochs, 276 steps, 2 workers, replicated, native | accuracy 0.9889 |"
        f" weights sha256 {'ab' * 32}"
    )
    assert re.fullmatch(
        r"\w+: \d+ epochs?, \d+ steps?, \d+ workers?, \w+, \w+ \| \w+ [\d.]+ \| weights sha256"
        r" [0-9a-f]{64}",
        line,
    )


def test_one_of_each_and_a_loss_that_is_no_number(tmp_path: Path) -> None:
    found = result(epochs=1, steps=1, workers=1, headline=("loss", float("nan"))).as_json()
    assert last_line(found).startswith(
        "digits: 1 epoch, 1 step, 1 worker, replicated, native | loss nan |"
    )
    (tmp_path / "result.json").write_text(
        json.dumps({**found, "headline": {"name": "loss", "value": "nan"}})
    )
    assert last_line(read(tmp_path / "result.json")) == last_line(found)


def test_no_epoch_is_counted_where_training_ends_inside_the_first() -> None:
    assert last_line(result(epochs=0, steps=6).as_json()).startswith(
        "digits: 6 steps, 2 workers, replicated"
    )


def test_paths_are_relative_to_the_run() -> None:
    assert result().as_json()["checkpoint"] == "checkpoints/step-0000276"
    assert result(run=None, checkpoint=None).as_json()["checkpoint"] is None
