"""Records are whole JSON lines at once."""

from __future__ import annotations

import json
import resource
from pathlib import Path

import pytest

from lockstep.errors import LockstepError, LockstepWarning
from lockstep.training.metrics import MetricsFile, TelemetryFile, finite
from tests.refused import refused

STEP = {"kind": "step", "step": 3, "epoch": 1, "loss": 0.5, "samples_by_rank": [1, 2]}


def test_a_line_each_readable_at_once(tmp_path: Path) -> None:
    with MetricsFile(tmp_path / "metrics.jsonl") as file:
        file.write(STEP)
        file.write({"kind": "event", "event": "start"})
        lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [STEP, {"kind": "event", "event": "start"}]


def test_what_json_cannot_say_becomes_text() -> None:
    found = finite(
        {"a": float("nan"), "b": [float("inf"), 1.5], "c": {"d": -float("inf")}, "e": "x"}
    )
    assert found == {"a": "nan", "b": ["inf", 1.5], "c": {"d": "-inf"}, "e": "x"}


def test_a_full_disk_is_told_with_the_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.symlink_to("/dev/full")
    values = {"file": str(path), "reason": "No space left on device"}
    with MetricsFile(path) as file, refused("metrics-not-written", LockstepError, **values):
        file.write(STEP)


def test_a_record_that_only_begins_to_fit_is_an_error(tmp_path: Path) -> None:
    """As on a disk that becomes full."""
    path = tmp_path / "metrics.jsonl"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with MetricsFile(path) as file:
        file.write(STEP)
        least = path.stat().st_size + 20
        resource.setrlimit(resource.RLIMIT_FSIZE, (least, hard))
        try:
            with refused("metrics-not-written", LockstepError):
                file.write(STEP)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert path.stat().st_size == least


def test_what_training_can_do_without_ends_with_one_warning(tmp_path: Path) -> None:
    (tmp_path / "rank-0.jsonl").symlink_to("/dev/full")
    file = TelemetryFile(tmp_path / "rank-0.jsonl")
    file.write(b"line")
    with pytest.warns(LockstepWarning, match=r"rank-0\.jsonl cannot be written") as caught:
        file.flush()
    file.write(b"x" * 2**17)
    file.close()
    assert len(caught) == 1


def test_what_is_open_is_not_written_to_another_folder_of_that_name(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    with MetricsFile(run / "metrics.jsonl") as file:
        run.rename(tmp_path / "moved")
        run.mkdir()
        file.write(STEP)
    assert not list(run.iterdir())
    assert json.loads((tmp_path / "moved" / "metrics.jsonl").read_text()) == STEP
