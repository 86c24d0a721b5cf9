"""Two runs never share a folder, and every reason to refuse one is a sentence."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

import lockstep
from lockstep.config.settings import Settings
from lockstep.errors import LockstepError
from lockstep.runtime import disk
from lockstep.training.run_directory import RunDirectory, write_settings
from tests.refused import refused
from tests.training.toy import task


def test_the_default_is_new_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("time.strftime", lambda form: "20260102-030405")
    with RunDirectory.claim(None, "toy") as first, RunDirectory.claim(None, "toy") as second:
        assert [str(first.path), str(second.path)] == [
            "runs/toy-20260102-030405",
            "runs/toy-20260102-030405-2",
        ]


def test_a_folder_in_use_names_pid_and_host(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "lock").write_text('{"pid": 1, "host": "gone"}')  # of a killed owner
    with RunDirectory.claim(run, "x"):
        us = {"pid": os.getpid(), "host": socket.gethostname()}
        assert json.loads((run / "lock").read_text()) == us
        with refused("run-directory-in-use", owner=f"process {us['pid']} on {us['host']}"):
            RunDirectory.claim(run, "x")
        with RunDirectory.of_launcher(run):  # a rank neither locks nor removes
            pass
        assert run.exists()
        with refused("run-directory-in-use"):
            RunDirectory.claim(run, "x")
    RunDirectory.claim(run, "x").release()


def test_a_folder_that_holds_something_else_is_refused_and_kept(tmp_path: Path) -> None:
    for code, names in (
        ("run-finished", ["lock", "metrics.jsonl", "result.json"]),
        ("run-directory-not-empty", ["thesis.tex"]),
    ):
        run = tmp_path / code
        run.mkdir()
        for name in names:
            (run / name).touch()
        with refused(code, path=str(run)):
            RunDirectory.claim(run, "x")
        assert sorted(path.name for path in run.iterdir()) == names


def test_a_run_that_did_not_come_to_its_end_may_go_on_as_it_was(tmp_path: Path) -> None:
    with RunDirectory.claim(tmp_path, "x") as run:
        write_settings(run, Settings(task="x", epochs=3, workers=2))
        run.metrics.touch()
        (tmp_path / "timeline.json.77.unfinished").touch()  # its writer was killed
    with RunDirectory.claim(tmp_path, "x") as run:
        assert run.begun
        assert not list(tmp_path.glob("*.unfinished"))
        write_settings(run, Settings(task="x", epochs=3, workers=4))
        place = f"unfinished run {tmp_path}"
        with refused("another-training", place=place, differences="epochs was 3 and is 5"):
            write_settings(run, Settings(task="x", epochs=5, workers=4))
    assert Settings.read(tmp_path).workers == 4


def test_fresh_sets_aside_what_is_there(tmp_path: Path) -> None:
    for number in (1, 2):
        for name in ("lock", "metrics.jsonl", "result.json"):
            (tmp_path / name).touch()
        (tmp_path / "checkpoints").mkdir()
        RunDirectory.claim(tmp_path, "x", fresh=True).release()
        names = sorted(path.name for path in (tmp_path / f"before-{number}").iterdir())
        assert names == ["checkpoints", "metrics.jsonl", "result.json"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["before-1", "before-2", "lock"]


def test_a_folder_stays_if_something_happened_or_it_was_there_before(tmp_path: Path) -> None:
    for file, text, stays in (
        ("settings.json", "", False),
        ("rank-0.log", "", False),
        ("metrics.jsonl", "something", True),
        ("rank-1.log", "something", True),
    ):
        with RunDirectory.claim(tmp_path / file, "x") as run:
            (run.path / file).write_text(text)
        assert run.path.exists() is stays
    (tmp_path / "before").mkdir()
    RunDirectory.claim(tmp_path / "before", "x").release()
    assert (tmp_path / "before").exists()


def test_a_folder_that_is_gone_or_another_is_noticed_by_owner_and_rank(tmp_path: Path) -> None:
    path, aside = tmp_path / "run", tmp_path / "aside"
    with RunDirectory.claim(path, "x") as owner:
        rank = RunDirectory.of_launcher(path)

        def both(what: str) -> None:
            for each in (owner, rank):
                with refused("run-directory-gone", LockstepError, path=str(path), what=what):
                    each.check()

        rank.check()
        path.rename(aside)
        both("was removed, moved or emptied")
        path.symlink_to(aside)
        rank.check()  # the same folder by another name
        owner.check()
        path.unlink()
        (tmp_path / "other").mkdir()
        path.symlink_to(tmp_path / "other")
        both("was removed, moved or emptied")
        with RunDirectory.claim(path, "x"):
            both("was replaced by another folder of that name")
        path.unlink()
        aside.rename(path)
        owner.check()
        (path / "lock").unlink()
        both("was removed, moved or emptied")


def test_a_folder_that_becomes_read_only_is_noticed_in_the_same_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a disk with errors does, at once; what is open stays open."""
    steps: list[int] = []
    options: dict[str, Any] = {"run": tmp_path / "run", "steps": 8, "checkpoint_every": 2}
    toy_task = task(on_step=lambda record: steps.append(record["step"]))
    with monkeypatch.context() as patch:
        patch.setattr(disk, "writable", lambda path: len(steps) < 5)
        with refused("run-directory-read-only", LockstepError, path=str(tmp_path / "run")):
            lockstep.train(toy_task, **options)
    assert steps == [1, 2, 3, 4, 5]
    lockstep.train(toy_task, **options)
    # the save after step 2 is whole, that after 4 may be
    assert steps[5:] in ([3, 4, 5, 6, 7, 8], [5, 6, 7, 8])


@pytest.mark.rest  # root alone may mount
def test_a_mount_that_is_read_only_is_noticed(tmp_path: Path) -> None:
    with RunDirectory.claim(tmp_path / "run", "x") as run:
        try:
            for options in (["--bind", str(run.path)], ["-o", "remount,ro,bind"]):
                mount = ["mount", *options, str(run.path)]
                if subprocess.run(mount, capture_output=True).returncode != 0:
                    pytest.skip("folders cannot be mounted here")
            with refused("run-directory-read-only", LockstepError, path=str(run.path)):
                run.check()
        finally:
            subprocess.run(["umount", run.path], capture_output=True)


def test_a_signal_during_the_claim_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "force", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        RunDirectory.claim(tmp_path / "runs" / "one", "x")
    assert not list(tmp_path.iterdir())


def test_what_took_its_name_is_not_removed(tmp_path: Path) -> None:
    with RunDirectory.claim(tmp_path / "run", "x"):
        (tmp_path / "run" / "lock").unlink()
        (tmp_path / "run").rmdir()
        with RunDirectory.claim(tmp_path / "run", "x") as other:
            other.metrics.write_text("theirs")
    assert other.metrics.read_text() == "theirs"


def test_a_run_that_failed_before_its_first_step_leaves_nothing(tmp_path: Path) -> None:
    nothing = ["rank-0.log", "anatomy/rank-0.jsonl", "events.out.tfevents.1"]
    for number, (files, event) in enumerate(
        (
            (nothing, '{"kind": "event"}\n'),
            ([], '{"kind": "step", "step": 1}\n'),
            (["checkpoints/step-0000001/state.json"], ""),
            (["result.json"], ""),
            (["mine.txt"], ""),
        )
    ):
        run = RunDirectory.claim(tmp_path / str(number), "x")
        run.metrics.write_text(event)
        for name in files:
            (run.path / name).parent.mkdir(parents=True, exist_ok=True)
            (run.path / name).write_text("{}")
        run.release(failed=True)
        assert run.path.exists() is (files is not nothing), files


def test_a_full_disk_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    values = {"path": str(tmp_path / "run"), "reason": "No space left on device"}
    with monkeypatch.context() as patch:
        patch.setattr("lockstep.training.run_directory._sign", full)
        with refused("run-directory-not-writable", **values):
            RunDirectory.claim(tmp_path / "run", "x")
    assert not (tmp_path / "run").exists()
    with RunDirectory.claim(tmp_path / "run", "x") as run:
        monkeypatch.setattr(Path, "write_text", full)
        with refused("run-directory-not-writable", **values):
            write_settings(run, Settings(task="x"))
