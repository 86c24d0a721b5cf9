"""docs/pictures/buckets.py and loss.py: the scripts of the measured pictures still draw."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.rest

PICTURES = Path(__file__).parents[2] / "docs" / "pictures"


@pytest.fixture
def buckets(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of buckets.py."""
    monkeypatch.syspath_prepend(str(PICTURES))
    import buckets

    return buckets


def test_the_script_records_and_draws_a_step_of_two_ranks(tmp_path: Path) -> None:
    file = tmp_path / "buckets.svg"
    subprocess.run([sys.executable, PICTURES / "buckets.py", "--out", file], check=True)
    assert file.read_text().count(">bucket ") == 2 * 6


def test_what_is_hidden(buckets: Any) -> None:
    """Seconds that can be counted on one's fingers: 2 of 3 seconds lie in the backward."""
    spans = {"forward": (10.0, 11.0), "backward": (11.0, 15.0), "update": (16.0, 17.0)}
    moments = [buckets.BucketMoments(12.0, 12.0, 13.0), buckets.BucketMoments(13.0, 14.0, 16.0)]
    step = buckets.RecordedStep([buckets.RankMoments(spans, moments, [8, 8])])
    assert step.hidden(0) == pytest.approx(2 / 3)
    last_bucket = buckets.text(step).splitlines()[-1].split()
    assert last_bucket[-3:] == ["3000.00", "4000.00", "6000.00"]


def test_the_losses_of_two_workers_are_those_of_one() -> None:
    loss = runpy.run_path(str(PICTURES / "loss.py"))
    losses = {workers: loss["losses_with"](workers, 3) for workers in (1, 2)}
    assert losses[1] == losses[2]
    drawn = loss["drawing"](losses)
    assert drawn.title.endswith("the same bits")
    assert drawn.svg().count("<polyline") >= 2
    assert loss["drawing"]({1: [2.0, 1.0], 2: [2.0, 1.5]}).title.endswith("other bits")
