"""docs/pictures/buckets.py and loss.py: the scripts of the measured pictures still draw."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.rest

PICTURES = Path(__file__).parents[2] / "docs" / "pictures"


def test_the_script_records_and_draws_a_step_of_two_ranks(tmp_path: Path) -> None:
    file = tmp_path / "buckets.svg"
    subprocess.run([sys.executable, PICTURES / "buckets.py", "--out", file], check=True)
    assert file.read_text().count(">bucket ") == 2 * 6


def test_the_losses_of_two_workers_are_those_of_one() -> None:
    loss = runpy.run_path(str(PICTURES / "loss.py"))
    losses = {workers: loss["losses_with"](workers, 3) for workers in (1, 2)}
    assert losses[1] == losses[2]
    drawn = loss["drawing"](losses)
    assert drawn.title.endswith("the same bits")
    assert drawn.svg().count("<polyline") >= 2
    assert loss["drawing"]({1: [2.0, 1.0], 2: [2.0, 1.5]}).title.endswith("other bits")
