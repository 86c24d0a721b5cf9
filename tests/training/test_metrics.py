"""Records are whole JSON lines at once, and TensorBoard gets the same numbers."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from lockstep.training.metrics import MetricsFile, finite

STEP = {"kind": "step", "step": 3, "epoch": 1, "loss": 0.5, "lr": 0.1, "samples_per_s": 7.0, "samples_by_rank": [1, 2]}


def test_a_line_each_readable_at_once(tmp_path: Path) -> None:
    with MetricsFile(tmp_path / "metrics.jsonl") as file:
        file.write(STEP)
        file.write({"kind": "event", "event": "start"})
        assert [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [
            STEP,
            {"kind": "event", "event": "start"},
        ]


def test_what_json_cannot_say_becomes_text() -> None:
    found = finite({"a": float("nan"), "b": [float("inf"), 1.5], "c": {"d": -float("inf")}, "e": "x"})
    assert found == {"a": "nan", "b": ["inf", 1.5], "c": {"d": "-inf"}, "e": "x"}


def test_tensorboard_gets_the_same(tmp_path: Path) -> None:
    with MetricsFile(tmp_path / "metrics.jsonl") as file:
        file.write(STEP)
        file.write({"kind": "evaluate", "step": 3, "epoch": 1, "metrics": {"accuracy": 0.75}})
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    (events,) = tmp_path.glob("events.out.tfevents.*")
    found = {}
    for event in EventFileLoader(str(events)).Load():
        for value in event.summary.value:
            found[value.tag] = (event.step, round(value.tensor.float_val[0], 6))
    assert found == {"train/loss": (3, 0.5), "train/lr": (3, 0.1), "train/samples_per_s": (3, 7.0), "evaluate/accuracy": (3, 0.75)}


def test_without_tensorboard_there_is_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard.summary.writer.event_file_writer", None)
    with MetricsFile(tmp_path / "metrics.jsonl") as file:
        file.write(STEP)
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]
