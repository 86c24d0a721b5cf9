"""What is written without TensorBoard's package is what the package reads."""

from __future__ import annotations

import math
from pathlib import Path

from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
from tensorboard.compat.proto.event_pb2 import Event

from lockstep.training.metrics import EventFile


def read(folder: Path) -> list[Event]:
    (file,) = folder.glob("events.out.tfevents.*")
    return [Event.FromString(octets) for octets in RawEventFileLoader(str(file)).Load()]


def test_tensorboard_reads_every_step_and_value(tmp_path: Path) -> None:
    written = {
        0: {"loss": 0.5},
        127: {},
        128: {"loss": -1.25, "evaluate/über": 2},
        2**40: {"a" * 300: 1e-3},
    }
    file = EventFile(tmp_path)
    for step, scalars in written.items():
        file.add(scalars, step)
    file.close()
    first, *events = read(tmp_path)
    assert first.file_version == "brain.Event:2"
    found = {
        event.step: {value.tag: value.simple_value for value in event.summary.value}
        for event in events
    }
    assert found.keys() == written.keys()
    for step, scalars in written.items():
        assert found[step].keys() == scalars.keys()
        assert all(
            math.isclose(found[step][tag], value, rel_tol=1e-6) for tag, value in scalars.items()
        )
    assert all(event.wall_time >= first.wall_time > 1e9 for event in events)


def test_values_that_32_bits_cannot_hold(tmp_path: Path) -> None:
    file = EventFile(tmp_path)
    file.add({"large": 1e300, "small": -1e300, "infinite": math.inf, "none": math.nan}, 1)
    file.close()
    large, small, infinite, none = (value.simple_value for value in read(tmp_path)[1].summary.value)
    assert (large, small, infinite) == (math.inf, -math.inf, math.inf)
    assert math.isnan(none)
