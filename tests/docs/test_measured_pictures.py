"""docs/pictures/buckets.py, memory.py and loss.py: the scripts of the measured pictures still draw."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep import launch

pytestmark = pytest.mark.rest

PICTURES = Path(__file__).parents[2] / "docs" / "pictures"


def test_the_script_records_and_draws_a_step_of_two_ranks(tmp_path: Path) -> None:
    file = tmp_path / "buckets.svg"
    subprocess.run([sys.executable, PICTURES / "buckets.py", "--out", file], check=True)
    assert file.read_text().count(">bucket ") == 2 * 6


def of_two_layers(variant: str) -> tuple[float, float, float, str]:
    """Peak, the end of the curve, all that stays, and the picture."""
    memory = runpy.run_path(str(PICTURES / "memory.py"))
    recorded = memory["recorded"](variant, layers=2)
    _, last = recorded.total[-1]
    stays = recorded.weights + recorded.state + recorded.gradients[-1][1]
    return recorded.peak, last, stays, memory["drawing"]({variant: recorded}).svg()


def test_memory_over_a_step_is_what_the_tensors_take() -> None:
    plain, last, stays, svg = launch(of_two_layers, 1, ("plain",))[0]
    checkpointed, *_ = launch(of_two_layers, 1, ("activation checkpointing",))[0]
    assert last == pytest.approx(stays, rel=0.05)  # with the data and the loss
    assert checkpointed < plain
    assert svg.count("<polygon") == 4


def test_the_losses_of_two_workers_are_those_of_one() -> None:
    loss = runpy.run_path(str(PICTURES / "loss.py"))
    losses = {workers: loss["losses_with"](workers, 3) for workers in (1, 2)}
    assert losses[1] == losses[2]
    drawn = loss["drawing"](losses)
    assert drawn.title.endswith("the same bits")
    assert drawn.svg().count("<polyline") >= 2
    assert loss["drawing"]({1: [2.0, 1.0], 2: [2.0, 1.5]}).title.endswith("other bits")
