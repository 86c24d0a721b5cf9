"""A run directory in any state is read, and what is no run is refused with a sentence."""

from __future__ import annotations

import fcntl
import json
from pathlib import Path

from lockstep.tools.recorded import read
from tests.refused import refused
from tests.tools.report.runs import make, metrics


def test_a_finished_run(tmp_path: Path) -> None:
    found = read(make(tmp_path))
    assert found.state == "finished"
    assert (len(found.steps), len(found.evaluations), len(found.events)) == (40, 2, 1)
    assert found.anatomy is not None
    assert found.start["epochs"] == 2


def test_under_way_and_killed_are_told_apart_by_the_lock(tmp_path: Path) -> None:
    make(tmp_path, finished=False)
    assert read(tmp_path).state == "interrupted"
    with (tmp_path / "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert read(tmp_path).state == "under way"
    assert read(tmp_path).state == "interrupted"


def test_half_lines_and_foreign_records_are_left_out(tmp_path: Path) -> None:
    make(tmp_path, records=metrics(3))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(
            '[1]\n{"kind":"step"}\n{"kind":"step","step":4,"loss":"nan","samples_per_s":1}\n{"kind":"evaluate","step":1}\n{"kind":"st'
        )
    found = read(tmp_path)
    assert [record["step"] for record in found.steps] == [1, 2, 3, 4]
    assert not found.evaluations


def test_damage(tmp_path: Path) -> None:
    with refused("not-a-run-directory", directory=str(tmp_path)):
        read(tmp_path)
    make(tmp_path)
    (tmp_path / "result.json").write_text("{")
    assert read(tmp_path).state == "interrupted"
    (tmp_path / "metrics.jsonl").unlink()
    assert not read(tmp_path).steps
    settings = json.loads((tmp_path / "settings.json").read_text())
    (tmp_path / "settings.json").write_text(json.dumps({**settings, "warp": 9}))
    with refused("foreign-settings", wrong="it has warp"):
        read(tmp_path)
