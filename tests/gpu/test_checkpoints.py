"""A checkpoint of a device goes on as if nothing had been, on the same device and on the other."""

from __future__ import annotations

from pathlib import Path

import pytest

import lockstep
from tests.gpu.training import STEPS, Training, close, equal

BETWEEN = [
    pytest.param("here", "here", id="same-device"),
    pytest.param("cuda", "cpu", id="cuda-to-cpu", marks=pytest.mark.gpu),
    pytest.param("cpu", "cuda", id="cpu-to-cuda", marks=pytest.mark.gpu),
]


@pytest.mark.parametrize("update", ["replicated", "sharded"])
@pytest.mark.parametrize(("first", "then"), BETWEEN)
def test_a_resumed_training_ends_as_the_undisturbed_one(
    tmp_path: Path, device: str, first: str, then: str, update: str
) -> None:
    with lockstep.init(device=device if first == "here" else first) as world:
        training = Training(world, update=update).walk(2)
        kept = lockstep.Checkpoints(tmp_path, training.stepper, training.loader)
        kept.save()
        expected = training.walk(STEPS).weights()  # while it is written
        kept.close()
    with lockstep.init(device=device if then == "here" else then) as world:
        again = Training(world, update=update)
        kept = lockstep.Checkpoints(tmp_path, again.stepper, again.loader)
        taken = kept.resume(step=2)
        assert taken is not None
        assert again.stepper.steps == 2
        found = again.walk(STEPS).weights()
        kept.close()
    if first == then:
        assert equal(found, expected)
    close(found, expected, 1e-5)
