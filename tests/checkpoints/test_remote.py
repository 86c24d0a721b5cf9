"""Copies of checkpoints at a URL: a host that is gone is made up for, half an upload is no
checkpoint, and nothing that comes down is believed.
"""

from __future__ import annotations

import shutil
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import lockstep
from lockstep.checkpoints import files
from lockstep.checkpoints.remote import Remote
from lockstep.config.retention import Retention
from lockstep.config.settings import Settings
from lockstep.errors import DamagedCheckpoint, LockstepError, LockstepWarning
from lockstep.training.run_directory import claimed
from tests.checkpoints.model_alone import write_model
from tests.checkpoints.test_checkpoints import Run, chosen, stopped
from tests.refused import refused
from tests.teams import on_team
from tests.training import toy


def resumed(
    world: lockstep.World, folder: Path, url: str
) -> tuple[int | None, list[float], list[Tensor]]:
    run = Run(world, folder, keep=2, remote=url)
    checkpoint = run.checkpoints.resume()
    return None if checkpoint is None else checkpoint.step, run.train(), run.weights()


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copies of steps 4 and 8, in a folder."""
    folder = tmp_path_factory.mktemp("remote")
    options = {"keep": 2, "remote": str(folder / "there")}
    on_team(stopped, 2, args=(folder / "here", 8), kwargs=options)
    return folder / "there"


@pytest.fixture
def there(two: Path, tmp_path: Path) -> Path:
    """The same, to be spoilt."""
    return Path(shutil.copytree(two, tmp_path / "there"))


def test_a_training_goes_on_from_its_copies_where_nothing_else_is_left(
    two: Path, there: Path, tmp_path: Path
) -> None:
    assert sorted(path.name for path in two.iterdir()) == ["step-0000004", "step-0000008"]
    assert all(files.read(path) for path in two.iterdir())
    undisturbed = on_team(resumed, 2, args=(tmp_path / "whole", str(tmp_path / "elsewhere")))
    ranks = on_team(resumed, 2, args=(tmp_path / "here", f"file://{there}"))
    for (_, losses, weights), (step, rest, ours) in zip(undisturbed, ranks, strict=True):
        assert (step, rest) == (8, losses[8:])
        assert all(map(torch.equal, ours, weights))
    assert sorted(path.name for path in there.iterdir()) == ["step-0000012", "step-0000015"]


def test_any_file_system_of_fsspec_takes_them_and_the_best_comes_back_too(tmp_path: Path) -> None:
    """Kept are one, and the best."""
    url = "memory://here/run"
    with lockstep.init() as world:
        run = Run(world, tmp_path / "a", keep=1, remote=url)
        for step in (8, 9, 10):
            run.stepper.steps = step
            run.checkpoints.save(best=("accuracy", 0.5) if step == 9 else None)
        run.checkpoints.close()
        checkpoint = Run(world, tmp_path / "b", remote=url).checkpoints.resume()
    assert checkpoint is not None
    assert (Remote(url).steps(), checkpoint.step) == ([9, 10], 10)
    assert files.best(tmp_path / "b") == tmp_path / "b" / "step-0000009"
    names = sorted(path.name for path in (tmp_path / "b").iterdir())
    assert names == ["best.json", "step-0000009", "step-0000010"]


def test_copies_of_a_lost_host_stay_by_the_same_rule(tmp_path: Path) -> None:
    remote = Remote(str(tmp_path / "there"))
    first = [
        write_model(tmp_path / "lost", step, {"x": torch.ones(9)}, {}) for step in (1, 2, 3, 4)
    ]
    remote.mirror(first[-1], dict.fromkeys(first, 100), None, Retention.of("all"))
    new = {write_model(tmp_path / "here", 5, {"x": torch.ones(9)}, {}): 100}
    remote.mirror(*new, new, None, Retention.of(None))
    assert remote.steps() == [2, 4, 5]
    remote.mirror(*new, new, None, Retention.of("all", 200))
    assert remote.steps() == [4, 5]


def test_what_is_here_and_newer_is_taken(there: Path, tmp_path: Path) -> None:
    here = tmp_path / "here"
    shutil.copytree(there, here)
    options = {"remote": str(there)}
    for until, step in ((7, 4), (8, 8)):
        assert on_team(chosen, 2, (tmp_path / f"until {until}", until), options)[0] == (step, [])
    shutil.rmtree(there / "step-0000008")
    assert on_team(chosen, 2, args=(here,), kwargs=options) == [(8, [])] * 2
    shutil.rmtree(here / "step-0000004")
    (here / "step-0000008" / "state.json").unlink()
    step, [said] = on_team(chosen, 2, args=(here,), kwargs=options)[0]
    assert step == 4
    assert "state.json is missing [checkpoint-file-missing]; " in said
    assert said.endswith("falling back to step-0000004 (4 steps lost)")


@pytest.mark.parametrize("survive", [0, 1, 4, 5])
def test_half_an_upload_is_no_checkpoint(
    two: Path, tmp_path: Path, survive: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection goes after so many files."""
    url = f"memory://half/{survive}"
    remote = Remote(url)
    remote.upload(two / "step-0000004")
    sent: list[str] = []
    real = type(remote._fs).put_file

    def breaks(self: Any, source: str, target: str) -> None:
        if len(sent) == survive:
            raise ConnectionError("gone")
        sent.append(target)
        real(self, source, target)

    count = len(list((two / "step-0000008").iterdir()))
    assert count == 6
    monkeypatch.setattr(type(remote._fs), "put_file", breaks)
    for folder in ("step-0000008", "step-0000004"):  # a new one, and one that replaces another
        sent.clear()
        with refused("checkpoint-copy-failed", LockstepError, url=url):
            remote.upload(two / folder)
        left = remote.steps()
        assert 8 not in left
        assert all(remote.fetch(step, tmp_path / "down").step == step for step in left)
        if folder == "step-0000008":
            assert left == [4], "the other is as it was"
    monkeypatch.undo()
    sizes = {two / "step-0000004": 1, two / "step-0000008": 1}
    remote.mirror(two / "step-0000008", sizes, None, Retention.of(2))
    assert remote.steps() == [4, 8], "and the next upload makes up for it"


def _flip(file: Path) -> None:
    octets = bytearray(file.read_bytes())
    octets[len(octets) // 2] ^= 4
    file.write_bytes(octets)


@pytest.mark.parametrize(
    ("spoil", "name", "code"),
    [
        (_flip, "model.safetensors", "checkpoint-file-changed"),
        (lambda file: file.write_text("{}"), "state.json", "checkpoint-file-changed"),
        (lambda file: file.write_bytes(bytes(10**6)), "state.json", "checkpoint-file-too-large"),
        (Path.unlink, "optimizer-00001.safetensors", "checkpoint-file-missing"),
        (_flip, "manifest.json", "checkpoint-file-changed"),
    ],
)
def test_a_damaged_copy_is_told_and_the_one_before_is_taken(
    there: Path, tmp_path: Path, spoil: Callable[[Path], object], name: str, code: str
) -> None:
    spoil(there / "step-0000008" / name)
    with refused(code, DamagedCheckpoint, checkpoint="step-0000008", file=name) as caught:
        Remote(str(there)).fetch(8, tmp_path / "down")
    assert str(caught.value).startswith(f"{there}: ")
    assert list((tmp_path / "down").iterdir()) == []
    options = {"remote": str(there)}
    (step, [said]), second = on_team(chosen, 2, args=(tmp_path / "here",), kwargs=options)
    assert step == 4
    assert f"{there}: " in said
    assert f"[{code}]" in said
    assert said.endswith("falling back to step-0000004 (4 steps lost)")
    assert second == (4, [])


@pytest.mark.parametrize("cause", ["no room here", "a file that is too long there"])
def test_what_is_not_to_be_brought_is_not(
    there: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cause: str
) -> None:
    remote, brought = Remote(str(there)), []
    real_usage, real_get = shutil.disk_usage, remote._fs.get_file

    def get_file(source: str, target: str) -> None:
        brought.append(Path(source).name)
        real_get(source, target)

    monkeypatch.setattr(remote._fs, "get_file", get_file)
    if cause == "no room here":
        monkeypatch.setattr(shutil, "disk_usage", lambda path: real_usage(path)._replace(free=1000))
        expected = pytest.raises(LockstepError, match="1000 bytes are free on the disk")
    else:
        (there / "step-0000008" / "state.json").write_bytes(bytes(10**6))
        expected = pytest.raises(DamagedCheckpoint)
    with expected:
        remote.fetch(8, tmp_path / "down")
    assert "manifest.json" in brought
    assert "state.json" not in brought
    assert list((tmp_path / "down").iterdir()) == []


def unreachable(world: lockstep.World, folder: Path) -> tuple[list[str], str, list[int]]:
    """It does not take the copies for a while, and then it does; and at the end not again."""
    url = str(folder / "there")
    run = Run(world, folder / "here", remote=url)

    def refuses(self: Remote, path: Path) -> None:
        raise LockstepError("no route")

    with warnings.catch_warnings(record=True) as caught, pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("always")
        patch.setattr(Remote, "upload", refuses)
        run.checkpoints.save()
        run.checkpoints.wait()
        patch.undo()
        run.stepper.steps += 1
        run.checkpoints.save()
        run.checkpoints.wait()
        steps = Remote(url).steps() if world.rank == 0 else []
        patch.setattr(Remote, "upload", refuses)
        run.stepper.steps += 1
        run.checkpoints.save()
        with pytest.raises(LockstepError) as raised:
            run.checkpoints.close()
    ours = [warning for warning in caught if issubclass(warning.category, LockstepWarning)]
    return [str(warning.message) for warning in ours], str(raised.value), steps


def test_what_could_not_be_copied_is_said_made_up_for_and_never_left_unsaid(tmp_path: Path) -> None:
    (first, end, steps), (second, also, _) = on_team(unreachable, 2, args=(tmp_path,))
    assert (first, second) == ([f"a checkpoint is in {tmp_path}/here only: no route"], [])
    assert end == also
    assert end.endswith(" [checkpoint-not-copied]")
    assert steps == [0, 1]


def test_copies_need_a_url_that_works_and_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    for url in ("nosuch://x", "s3://bucket/x"):
        with refused("unknown-checkpoint-url", url=url):
            Remote(url)
    with refused("needs-run-directory", name="checkpoints", value=str(tmp_path)):
        lockstep.train(toy.task(), checkpoints=str(tmp_path))


def test_another_run_goes_on_from_the_copies_and_a_fresh_one_sets_them_aside(
    tmp_path: Path,
) -> None:
    copies = tmp_path / "copies"
    options: dict[str, Any] = {"checkpoints": str(copies), "checkpoint_every": 2, "steps": 6}
    task = toy.task(best="accuracy", best_mode="max")
    first = lockstep.train(task, run=tmp_path / "one", exact=True, **options)
    shutil.rmtree(copies / "step-0000006")
    second = lockstep.train(task, run=tmp_path / "two", exact=True, **options)
    assert "resumed from step 4 of 6" in (tmp_path / "two" / "metrics.jsonl").read_text()
    assert first.sha256 == second.sha256
    settings = Settings(task="digits", checkpoints=str(copies))
    claimed(settings, tmp_path / "three", resume=True, fresh=False).release()
    claimed(settings, tmp_path / "three", resume=False, fresh=True).release()
    assert Remote(str(copies)).steps() == []
    assert {path.name for path in (copies / "before-1").iterdir()} >= {"best.json", "step-0000006"}
    with pytest.raises(SystemExit):
        claimed(settings, tmp_path / "three", resume=True, fresh=False)
