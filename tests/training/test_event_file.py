"""What is written without TensorBoard's writer is what the package reads."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
from tensorboard.compat.proto.event_pb2 import Event

from lockstep.training.logger_packages import TensorBoard
from lockstep.training.loggers import LoggedRun


def written(folder: Path, metrics: dict[int, dict[str, Any]]) -> list[Event]:
    run = LoggedRun(
        path=folder, records=folder / "metrics.jsonl", task="toy", step=0, parameters={}
    )
    board = TensorBoard(run)
    for step, values in metrics.items():
        board.add({"kind": "evaluate", "step": step, "metrics": values})
    board.close("FINISHED", {})
    (file,) = folder.glob("events.out.tfevents.*")
    return [Event.FromString(octets) for octets in RawEventFileLoader(str(file)).Load()]


def scalars(event: Event) -> dict[str, float]:
    return {
        value.tag: value.simple_value
        for value in event.summary.value
        if value.HasField("simple_value")
    }


def test_tensorboard_reads_every_step_and_value(tmp_path: Path) -> None:
    given = {1: {"loss": 0.5}, 128: {"loss": -1.25, "über": 2}, 2**40: {"a" * 300: 1e-3}}
    first, *events = written(tmp_path, given)
    assert first.file_version == "brain.Event:2"
    found = {event.step: scalars(event) for event in events if scalars(event)}
    assert found.keys() == given.keys()
    for step, values in given.items():
        assert found[step].keys() == {f"evaluate/{name}" for name in values}
        for name, value in values.items():
            assert math.isclose(found[step][f"evaluate/{name}"], value, rel_tol=1e-6)
    assert all(event.wall_time >= first.wall_time > 1e9 for event in events)


def test_values_that_32_bits_cannot_hold(tmp_path: Path) -> None:
    given = {"large": 1e300, "small": -1e300, "infinite": math.inf, "none": math.nan}
    *_, last = written(tmp_path, {1: given})
    large, small, infinite, none = scalars(last).values()
    assert (large, small, infinite) == (math.inf, -math.inf, math.inf)
    assert math.isnan(none)
