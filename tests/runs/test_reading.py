"""A run directory in any state is read, and what is no run is refused with a sentence."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path

from lockstep.runs import read, reading
from tests.refused import refused
from tests.tools.report.runs import make, metrics


def checkpoint(folder: Path, size: int = 10) -> None:
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(bytes(size))


def test_a_finished_run(tmp_path: Path) -> None:
    run = read(make(tmp_path))
    assert run.state == "finished"
    assert (len(run.steps), len(run.evaluations), len(run.events)) == (40, 2, 1)
    assert run.timeline is not None
    assert run.start["epochs"] == 2
    assert run.events[0].line.startswith("global batch 64")
    assert run.complete
    assert [run.step(number) for number in (0, 41)] == [None, None]
    step = run.step(4)
    assert step is not None
    assert (step.step, step.loss, step.weight, step.lr, step.grad_norm) == (4, 0.5, 64.0, 0.1, None)
    assert run.evaluations[0].metrics == {"accuracy": 0.95, "loss": 0.15}


def test_under_way_and_killed_are_told_apart_by_the_lock(tmp_path: Path) -> None:
    make(tmp_path, finished=False)
    assert read(tmp_path).state == "interrupted"
    with (tmp_path / "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert read(tmp_path).state == "under way"
    assert read(tmp_path).state == "interrupted"


def test_the_last_record_of_a_step_counts(tmp_path: Path) -> None:
    again = {"kind": "step", "step": 2, "loss": 7.0, "samples_per_s": 1.0, "surprise": [1]}
    run = read(make(tmp_path, records=metrics(3, more=[again])))
    assert [record.step for record in run.steps] == [1, 2, 3]
    assert run.steps[1].loss == 7.0
    assert run.steps[1].more == {"surprise": [1]}


def test_half_lines_and_foreign_records_are_left_out(tmp_path: Path) -> None:
    make(tmp_path, records=metrics(3))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(
            '[1]\n{"kind":"step"}\n{"kind":"step","step":4,"loss":"nan","samples_per_s":1}\n'
            '{"kind":"step","step":5,"loss":"low","samples_per_s":1}\n'
            '{"kind":"step","step":-6,"loss":1,"samples_per_s":1}\n'
            '{"kind":"evaluate","step":1}\n{"kind":"of a later version","x":1}\n{"kind":"st'
        )
    run = read(tmp_path)
    assert [record.step for record in run.steps] == [1, 2, 3, 4]
    assert not run.evaluations
    assert not run.complete


def test_only_the_end_of_a_huge_file_is_read(tmp_path: Path) -> None:
    make(tmp_path)
    file = tmp_path / "metrics.jsonl"
    lines = file.read_bytes()
    with file.open("wb") as sparse:
        sparse.write(lines.replace(b'"step": 3,', b'"step": 77,'))
        sparse.seek(2 * reading.MOST)
        sparse.write(b"\n" + lines)
    run = read(tmp_path)
    assert len(run.steps) == 40
    assert not run.complete


def test_a_line_of_any_length_takes_bounded_memory(tmp_path: Path) -> None:
    make(tmp_path, records=metrics(3))
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"kind": "event", "event": "' + b"x" * 2**22 + b'"}\n')
        file.write(b'{"kind": "event", "event": "short"}\n')
    run = read(tmp_path)
    assert [event.event for event in run.events] == ["start", "short"]
    assert not run.complete


def test_checkpoints_of_all_models(tmp_path: Path) -> None:
    make(tmp_path)
    for step in (10, 20, 30):
        checkpoint(tmp_path / "checkpoints" / f"step-{step:07d}", size=step)
        checkpoint(tmp_path / "checkpoints-2" / f"step-{step:07d}")
    (tmp_path / "checkpoints" / "best.json").write_text('{"checkpoint": "step-0000020"}')
    (tmp_path / "checkpoints" / "step-0000040").mkdir()  # without a manifest it is none
    (tmp_path / "checkpoints" / "set-aside-step-0000050").mkdir()
    run = read(tmp_path)
    records = [(record.step, record.model, record.bytes, record.best) for record in run.checkpoints]
    assert records[:3] == [(10, 1, 12, False), (10, 2, 12, False), (20, 1, 22, True)]
    assert len(records) == 6
    before = [run.checkpoint_before(step) for step in (10, 11, 30, 1000)]
    assert [record and record.step for record in before] == [None, 10, 20, 30]
    assert before[1] is not None
    assert before[1].path == tmp_path / "checkpoints" / "step-0000010"


def test_damage(tmp_path: Path) -> None:
    with refused("not-a-run-directory", directory=str(tmp_path / "nothing")):
        read(tmp_path / "nothing")
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
    (tmp_path / "settings.json").write_text(" " * (2**20 + 1))
    with refused("not-a-run-directory", reason="it has more than 1048576 bytes"):
        read(tmp_path)


def test_a_pipe_does_not_block_the_reader(tmp_path: Path) -> None:
    make(tmp_path)
    for name in ("metrics.jsonl", "result.json", "anatomy/rank-0.jsonl"):
        (tmp_path / name).unlink()
        os.mkfifo(tmp_path / name)
    run = read(tmp_path)
    assert (run.state, run.steps, run.complete) == ("interrupted", [], False)
    (tmp_path / "settings.json").unlink()
    os.mkfifo(tmp_path / "settings.json")
    with refused("not-a-run-directory", reason="it is not a regular file"):
        read(tmp_path)


def test_reading_writes_nothing(tmp_path: Path) -> None:
    make(tmp_path)
    checkpoint(tmp_path / "checkpoints" / "step-0000010")
    before = {path: path.lstat().st_mtime_ns for path in tmp_path.rglob("*")}
    for path in (*before, tmp_path):
        path.chmod(0o500 if path.is_dir() else 0o400)
    try:
        assert len(read(tmp_path).checkpoints) == 1
    finally:
        for path in (tmp_path, *before):
            path.chmod(0o700)
    assert {path: path.lstat().st_mtime_ns for path in tmp_path.rglob("*")} == before
