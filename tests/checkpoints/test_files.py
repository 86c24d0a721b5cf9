"""A checkpoint is there whole or not at all, and what is read back is what was written, to the
bit.
"""

from __future__ import annotations

import errno
import itertools
import json
import re
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.checkpoints import files, folders
from lockstep.checkpoints.manifest import measured
from lockstep.checkpoints.pieces import TensorFile, image, write
from lockstep.checkpoints.saver import Pace, Saver
from lockstep.config.retention import Retention
from lockstep.errors import LockstepError
from lockstep.gradients.saved_state import TensorPiece
from tests.checkpoints.model_alone import write_model
from tests.refused import refused

_WHOLE = torch.arange(6.0)
TENSORS = {
    "whole": _WHOLE,
    "tail": _WHOLE[3:],
    "again": _WHOLE.view(2, 3),
    "weight": torch.randn(3, 4),
    "turned": torch.randn(4, 3).t(),
    "part": torch.arange(10)[2:5],
}


def test_there_and_back(tmp_path: Path) -> None:
    state = {"task": "toy", "metrics": {"loss": 0.5}}
    write_model(tmp_path / "checkpoints", 12, {"y": torch.ones(1)}, {})
    folder = write_model(tmp_path / "checkpoints", 12, TENSORS, state)  # replaces it
    assert folder == tmp_path / "checkpoints" / "step-0000012"
    found = files.read(folder)
    assert found.state == {"step": 12, **state}
    assert set(found.tensors) == set(TENSORS)
    for name, tensor in TENSORS.items():
        assert found.tensors[name].dtype == tensor.dtype
        assert torch.equal(found.tensors[name], tensor)


def test_a_save_is_of_the_moment_when_it_was_asked_for(tmp_path: Path) -> None:
    """Of many of the disk's blocks, and a part of one."""
    tensor = torch.arange(2**20 + 5, dtype=torch.int32)
    expected, saver = tensor.clone(), Saver(tmp_path, None)
    for step in (1, 2):
        saver.save(step, files.parts({"x": tensor, "tied": tensor}, [], 0), {})
        tensor.zero_()
        saver.wait()
        found = files.read(folders.folder_of(tmp_path, step))
        assert torch.equal(found.tensors["x"], expected)
        tensor.copy_(expected.neg_())
    saver.close()


def _refusing(stream: object, command: int, flags: int = 0) -> int:
    if flags:
        raise OSError(errno.ENOTSUP, "Operation not supported")
    return 0


@pytest.mark.parametrize(
    ("name", "value"),
    [("lockstep.checkpoints.pieces._BLOCK", 1000), ("fcntl.fcntl", _refusing)],
    ids=["a disk with other blocks", "a file system without direct writes"],
)
def test_what_cannot_be_written_directly_goes_through_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: Any
) -> None:
    monkeypatch.setattr(name, value)
    octets = torch.arange(9321).to(torch.uint8)
    digest = write(tmp_path / "x", octets)
    assert (tmp_path / "x").read_bytes() == octets.numpy().tobytes()
    assert digest == measured(tmp_path / "x").digest


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/smaps")
def test_a_forked_process_does_not_keep_a_snapshots_memory() -> None:
    memory = image(TensorFile("x", [TensorPiece("x", torch.ones(3 * 2**20))]))
    at = memory.data_ptr()
    for each in re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text()):
        begin, end = (int(text, 16) for text in (each.split(maxsplit=1) or ["0-0"])[0].split("-"))
        if begin <= at < end:
            break
    assert "dc" in each.partition("VmFlags:")[2].split()  # not copied by a fork


def test_a_wait_that_was_interrupted_leaves_the_save_under_way(tmp_path: Path) -> None:
    """Its memory is not to be had for the next one yet."""
    waiting, going_on = threading.Event(), threading.Event()

    def done(folder: Path) -> None:
        waiting.wait()
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
        going_on.wait()

    def wait() -> None:
        waiting.set()
        saver.wait()

    before = signal.signal(signal.SIGUSR1, signal.default_int_handler)
    saver = Saver(tmp_path, None)
    try:
        saver.save(1, files.parts({"x": torch.ones(2)}, [], 0), {}, done)
        with pytest.raises(KeyboardInterrupt):
            wait()
        assert saver.busy
    finally:
        signal.signal(signal.SIGUSR1, before)
        going_on.set()
        saver.wait()
        saver.close()
    assert not saver.busy


def test_a_state_that_is_no_json_is_an_error_of_the_save(tmp_path: Path) -> None:
    """Other ranks hear of it: they would wait."""
    saver = Saver(tmp_path, None)
    saver.save(1, files.parts({"x": torch.ones(2)}, [], 0), {"extra": object()})
    with refused("checkpoint-not-written", LockstepError):
        saver.wait()
    saver.close()
    assert not list(tmp_path.iterdir())


def test_what_was_read_stays_whatever_becomes_of_the_file(tmp_path: Path) -> None:
    found = files.read(write_model(tmp_path, 1, {"x": torch.ones(5000)}, {}))
    read = found.tensors["x"]
    file = found.folder / files.MODEL
    size = file.stat().st_size
    with file.open("r+b") as stream:
        stream.write(bytes(size))
    assert torch.equal(read, torch.ones(5000))


def test_newest_goes_by_number_and_ignores_what_is_unfinished(tmp_path: Path) -> None:
    assert folders.newest(tmp_path / "nowhere") is None
    for step in (9, 10_000_000, 200):
        write_model(tmp_path, step, {"x": torch.tensor(step)}, {})
    (tmp_path / ".step-0099999.1.unfinished").mkdir()
    (tmp_path / "step-notes").mkdir()
    names = [path.name for path in folders.written(tmp_path)]
    assert names == ["step-0000009", "step-0000200", "step-10000000"]
    assert folders.newest(tmp_path) == tmp_path / "step-10000000"


def test_a_failed_write_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_model(tmp_path, 3, {"x": torch.ones(2)}, {"good": True})
    monkeypatch.setattr(
        "os.fsync", lambda handle: (_ for _ in ()).throw(OSError(28, "No space left on device"))
    )
    saver = Saver(tmp_path, None)
    saver.save(3, files.parts({"x": torch.zeros(2)}, [], 0), {})
    values = {"checkpoint": str(folder), "reason": "[Errno 28] No space left on device"}
    with refused("checkpoint-not-written", LockstepError, **values):
        saver.wait()
    saver.close()
    assert files.read(folder).state["good"] is True
    assert [path.name for path in tmp_path.iterdir()] == ["step-0000003"]


def test_killed_between_the_old_one_and_the_new_one_of_a_step(tmp_path: Path) -> None:
    """The simulation found it: the old one had lost its name, and resume removed it."""
    old = write_model(tmp_path, 3, {"x": torch.ones(2)}, {})
    old.rename(tmp_path / ".step-0000003.77.replaced.unfinished")
    (tmp_path / ".step-0000003.77.unfinished").mkdir()
    folders.sweep(tmp_path)
    assert files.read(old).tensors.keys() == {"x"}
    assert list(tmp_path.iterdir()) == [old]


def test_a_sweep_forces_names_before_it_removes_and_leaves_what_is_not_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The simulation found it: the rename that was not forced was undone by a loss of power, and
    what had that name before was gone.
    """
    (left := tmp_path / ".step-0000003.77.replaced.unfinished").mkdir()
    new = write_model(tmp_path, 3, {"y": torch.ones(1)}, {})
    (tmp_path / "best.json.77.unfinished").touch()  # the simulation found that it stayed
    (tmp_path / "thesis.unfinished").touch()
    there = []
    monkeypatch.setattr(folders, "force", lambda folder: there.append((folder, left.exists())))
    folders.sweep(tmp_path)
    assert there == [(tmp_path, True)]
    assert files.read(new).tensors.keys() == {"y"}
    assert sorted(tmp_path.iterdir()) == [new, tmp_path / "thesis.unfinished"]


def test_the_best_is_kept_beside_the_newest(tmp_path: Path) -> None:
    assert files.best(tmp_path) is None
    made = [write_model(tmp_path, step, {"x": torch.ones(1)}, {}) for step in (1, 2, 3)]
    files.mark_best(made[0], "accuracy", 0.9)
    files.mark_best(made[1], "accuracy", 0.95)
    folders.keep_only(tmp_path, made[1:])
    assert files.best(tmp_path) == made[1]
    assert folders.written(tmp_path) == made[1:]
    mark = {"checkpoint": "step-0000002", "metric": "accuracy", "value": 0.95}
    assert json.loads((tmp_path / "best.json").read_text()) == mark


gaps = st.lists(st.integers(1, 40), min_size=1, max_size=60)


@given(gaps, st.booleans(), st.data())
def test_any_step_is_half_of_its_age_from_a_checkpoint(
    gaps: list[int], even: bool, data: st.DataObject
) -> None:
    """After every save: as near as the saved steps allow, also if others stay for other reasons."""
    saved = list(itertools.accumulate([gaps[0]] * len(gaps) if even else gaps))
    there: dict[int, int] = {}
    for newest in saved:
        there[newest] = 1
        protected = data.draw(st.sets(st.sampled_from(sorted(there)), max_size=1))
        stays = folders.staying(there, Retention(), newest, protected)
        there = dict.fromkeys(stays, 1)
        for step in range(newest + 1):
            nearest = max((saved for saved in stays if saved <= step), default=0)
            possible = max((other for other in saved if other <= step), default=0)
            assert nearest == possible or 2 * (step - nearest) <= newest - step


def test_few_checkpoints_stay_of_many() -> None:
    steps: list[int] = []
    counts = {}
    for newest in range(100, 100_001, 100):
        steps = folders.by_age([*steps, newest])
        counts[newest] = len(steps)
    assert steps[-2:] == [99_900, 100_000]
    assert [counts[saves * 100] for saves in (1, 10, 100, 1000)] == [1, 7, 14, 23]


def test_what_else_stays() -> None:
    sizes = dict.fromkeys((10, 20, 30, 40, 50, 60), 100)
    for keep, keep_bytes, expected in (
        (2, None, {10, 40, 50}),
        ("3", None, {10, 30, 40, 50}),
        ("all", None, {10, 20, 30, 40, 50}),
        ("all", 300, {10, 40, 50}),
        ("all", "0.35 kB", {10, 40, 50}),
        ("all", "0.35KiB", {10, 40, 50}),
        ("all", "350B", {10, 40, 50}),
        (None, "1GiB", {10, 20, 30, 40, 50}),
        ("all", 1, {10, 50}),
    ):
        retention = Retention.of(keep, keep_bytes)
        # 60 is of a training that has resumed before it, 10 is the best
        assert folders.staying(sizes, retention, 50, {10}) == expected, (keep, keep_bytes)
    for name, value in (("keep", 0), ("keep", "some"), ("keep", True), ("keep", 1.5)):
        with refused("wrong-value", name=name, value=value):
            Retention.of(value)
    for value in ("20", "GB", 0, "0B", "-1GB", "20XB"):
        with refused("wrong-value", name="keep_bytes", value=value):
            Retention.of(None, value)


def test_tidy_removes_what_need_not_stay(tmp_path: Path) -> None:
    for step in range(1, 7):
        newest = write_model(tmp_path, step, {"x": torch.ones(100)}, {})
    remaining = folders.tidy(newest, Retention.of(1), 3, tmp_path / "step-0000002")
    assert [path.name[-1] for path in remaining] == ["2", "3", "6"]
    assert folders.written(tmp_path) == list(remaining)
    assert set(remaining.values()) == {folders.size_of(newest)}


def test_a_large_file_is_written_with_pauses_between_its_pieces(tmp_path: Path) -> None:
    octets = torch.arange(10 * 2**20, dtype=torch.int32).view(torch.uint8)[5:]  # 40 MiB less 5
    pauses: list[float] = []
    digest = write(tmp_path / "x", octets, pauses.append)
    assert (tmp_path / "x").read_bytes() == octets.numpy().tobytes()
    assert digest == measured(tmp_path / "x").digest
    assert len(pauses) == 2, "none after the last piece"
    assert min(pauses) > 0
    Pace(most=0.0).pause(1e6)  # other ranks would wait too long


def test_waiting_for_a_save_ends_its_pauses(tmp_path: Path) -> None:
    class Forever(Pace):
        def pause(self, worked: float) -> None:
            super().pause(1e6)

    tensor = torch.arange(10 * 2**20, dtype=torch.int32)  # three pieces
    saver = Saver(tmp_path, None, pace=Forever())
    saver.save(1, files.parts({"x": tensor}, [], 0), {})
    saver.wait()
    assert torch.equal(files.read(folders.folder_of(tmp_path, 1)).tensors["x"], tensor)
    saver.close()
