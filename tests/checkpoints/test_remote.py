"""Copies of checkpoints at a URL: a host that is gone is made up for, half an upload is no
checkpoint, and nothing that comes down is believed.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from torch import Tensor

import lockstep
from lockstep.checkpoints import files, folders
from lockstep.checkpoints.remote import Remote
from lockstep.errors import DamagedCheckpoint, LockstepError, LockstepWarning
from lockstep.testing import run_ranks
from tests.checkpoints.test_checkpoints import Run
from tests.refused import refused


class Copied(Run):
    """The training of test_checkpoints, with copies."""

    def __init__(self, world: lockstep.World, folder: str, url: str, keep: int = 2) -> None:
        super().__init__(world, folder)
        self.checkpoints = lockstep.Checkpoints(
            folder, self.stepper, self.loader, every=4, keep=keep, remote=url
        )


def stopped(world: lockstep.World, folder: str, url: str, stop: int) -> None:
    Copied(world, folder, url).train(stop)


def resumed(world: lockstep.World, folder: str, url: str) -> tuple[int, list[float], list[Tensor]]:
    run = Copied(world, folder, url)
    found = run.checkpoints.resume()
    return -1 if found is None else found.step, run.train(), run.weights()


def at(world: lockstep.World, folder: str, url: str) -> tuple[int | None, list[str]]:
    """Which step is gone on from, and what was warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = Copied(world, folder, url).checkpoints.resume()
    return None if found is None else found.step, [
        str(each.message) for each in caught if issubclass(each.category, LockstepWarning)
    ]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copies of steps 4 and 8, in a folder."""
    folder = tmp_path_factory.mktemp("remote")
    run_ranks(stopped, 2, args=(str(folder / "here"), str(folder / "there"), 8))
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
    _, losses, weights = run_ranks(
        resumed, 1, args=(str(tmp_path / "whole"), str(tmp_path / "elsewhere"))
    )[0]
    for step, rest, found in run_ranks(
        resumed, 3, args=(str(tmp_path / "here"), f"file://{there}")
    ):
        assert (step, rest) == (8, losses[8:])
        assert all(map(torch.equal, found, weights))
    assert sorted(path.name for path in there.iterdir()) == ["step-0000012", "step-0000015"]


def in_memory(world: lockstep.World, folder: str) -> list[Any]:
    run = Copied(world, f"{folder}/a", "memory://here/run")
    run.train(9)
    run.checkpoints = lockstep.Checkpoints(
        f"{folder}/a", run.stepper, run.loader, every=4, remote="memory://here/run"
    )
    run.checkpoints.save(best=("accuracy", 0.5))
    run.checkpoints.close()
    run.checkpoints = lockstep.Checkpoints(
        f"{folder}/a", run.stepper, run.loader, every=4, keep=1, remote="memory://here/run"
    )
    run.stepper.steps += 1
    run.checkpoints.save()
    run.checkpoints.close()
    again = Copied(world, f"{folder}/b", "memory://here/run")
    found = again.checkpoints.resume()
    marked = files.best(Path(folder, "b"))
    assert found is not None
    assert marked is not None
    return [
        Remote("memory://here/run").steps(),
        found.step,
        marked.name,
        sorted(path.name for path in Path(folder, "b").iterdir()),
    ]


def test_any_file_system_of_fsspec_takes_them_and_the_best_comes_back_too(tmp_path: Path) -> None:
    """Kept are one, and the best."""
    steps, step, best, names = run_ranks(in_memory, 1, args=(str(tmp_path),))[0]
    assert (steps, step, best) == ([9, 10], 10, "step-0000009")
    assert names == ["best.json", "step-0000009", "step-0000010"]


def test_what_is_here_and_newer_is_taken(there: Path, tmp_path: Path) -> None:
    here = tmp_path / "here"
    shutil.copytree(there, here)
    shutil.rmtree(there / "step-0000008")
    assert run_ranks(at, 1, args=(str(here), str(there))) == [(8, [])]
    shutil.rmtree(here / "step-0000004")
    (here / "step-0000008" / "state.json").unlink()
    step, said = run_ranks(at, 2, args=(str(here), str(there)))[0]
    assert (step, len(said)) == (4, 1)
    assert "state.json is missing [checkpoint-file-missing]; " in said[0]
    assert said[0].endswith("falling back to step-0000004 (4 steps lost)")


@pytest.mark.parametrize("survive", range(6))
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
        with refused(
            "checkpoint-copy-failed",
            LockstepError,
            url=f"memory://half/{survive}",
            what=f"did not accept {folder}",
            reason="ConnectionError: gone",
        ):
            remote.upload(two / folder)
        left = remote.steps()
        assert 8 not in left
        assert all(remote.fetch(step, tmp_path / "down").step == step for step in left)
        if folder == "step-0000008":
            assert left == [4], "the other is as it was"
    monkeypatch.undo()
    remote.mirror(two / "step-0000008", [two / "step-0000004", two / "step-0000008"], None)
    assert remote.steps() == [4, 8], "and the next upload makes up for it"


def _flip(file: Path) -> None:
    octets = bytearray(file.read_bytes())
    octets[len(octets) // 2] ^= 4
    file.write_bytes(octets)


SPOILT: dict[str, tuple[Callable[[Path], object], str, dict[str, Any]]] = {
    "a flipped bit": (
        lambda folder: _flip(folder / "model.safetensors"),
        "checkpoint-file-changed",
        {"file": "model.safetensors", "difference": "its digest is not the one in manifest.json"},
    ),
    "a file cut short": (
        lambda folder: (folder / "state.json").write_text("{}"),
        "checkpoint-file-changed",
        {"file": "state.json"},
    ),
    "a file too long": (
        lambda folder: (folder / "state.json").write_bytes(bytes(10**6)),
        "checkpoint-file-too-large",
        {"file": "state.json", "size": 10**6},
    ),
    "a file gone": (
        lambda folder: (folder / "optimizer-00001.safetensors").unlink(),
        "checkpoint-file-missing",
        {"file": "optimizer-00001.safetensors"},
    ),
    "another manifest": (
        lambda folder: _flip(folder / "manifest.json"),
        "checkpoint-file-changed",
        {"file": "manifest.json", "difference": "its SHA-256 is not the one in manifest.sha256"},
    ),
}


@pytest.mark.parametrize("how", list(SPOILT))
def test_a_damaged_copy_is_told_and_the_one_before_is_taken(
    there: Path, tmp_path: Path, how: str
) -> None:
    spoil, code, values = SPOILT[how]
    spoil(there / "step-0000008")
    with refused(code, DamagedCheckpoint, checkpoint="step-0000008", **values) as caught:
        Remote(str(there)).fetch(8, tmp_path / "down")
    assert str(caught.value).startswith(f"{there}: ")
    assert list((tmp_path / "down").iterdir()) == []
    (step, said), (_, unsaid) = run_ranks(at, 2, args=(str(tmp_path / "here"), str(there)))
    assert step == 4
    assert f"{there}: " in said[0]
    assert f"[{code}]" in said[0]
    assert said[0].endswith("falling back to step-0000004 (4 steps lost)")
    assert unsaid == []


def test_a_copy_that_does_not_fit_is_not_brought(
    two: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = shutil.disk_usage
    monkeypatch.setattr(shutil, "disk_usage", lambda path: real(path)._replace(free=1000))
    with pytest.raises(LockstepError, match="1000 bytes are free on the disk"):
        Remote(str(two)).fetch(8, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_no_more_is_brought_than_the_manifest_says(
    there: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (there / "step-0000008" / "state.json").write_bytes(bytes(10**6))
    remote, brought = Remote(str(there)), []
    real = remote._fs.get_file
    monkeypatch.setattr(
        remote._fs,
        "get_file",
        lambda source, target: (brought.append(Path(source).name), real(source, target)),
    )
    with pytest.raises(DamagedCheckpoint):
        remote.fetch(8, tmp_path)
    assert "manifest.json" in brought
    assert "state.json" not in brought


def unreachable(world: lockstep.World, folder: str) -> tuple[list[str], str, list[int]]:
    """It does not take the copies for a while, and then it does; and at the end not again."""
    url = f"{folder}/there"
    run = Copied(world, f"{folder}/here", url)
    real = Remote.upload

    def refuses(self: Remote, path: Path) -> None:
        raise LockstepError("no route")

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Remote.upload = refuses  # type: ignore[method-assign]
        run.checkpoints.save()
        run.checkpoints.wait()
        Remote.upload = real  # type: ignore[method-assign]
        run.stepper.steps += 1
        run.checkpoints.save()
        run.checkpoints.wait()
        steps = Remote(url).steps() if world.rank == 0 else []
        Remote.upload = refuses  # type: ignore[method-assign]
        run.stepper.steps += 1
        run.checkpoints.save()
        with pytest.raises(LockstepError) as raised:
            run.checkpoints.close()
        Remote.upload = real  # type: ignore[method-assign]
    return (
        [str(each.message) for each in caught if issubclass(each.category, LockstepWarning)],
        str(raised.value),
        steps,
    )


def test_what_could_not_be_copied_is_said_made_up_for_and_never_left_unsaid(tmp_path: Path) -> None:
    (first, end, steps), (second, also, _) = run_ranks(unreachable, 2, args=(str(tmp_path),))
    assert (first, second) == ([f"a checkpoint is in {tmp_path}/here only: no route"], [])
    assert (
        end
        == also
        == f"the last checkpoint is in {tmp_path}/here only: no route [checkpoint-not-copied]"
    )
    assert steps == [0, 1]


@pytest.mark.parametrize("url", ["nosuch://x", "s3://bucket/x"])
def test_a_url_that_cannot_work_is_one_sentence(url: str, tmp_path: Path) -> None:
    if url.startswith("s3") and "s3" in fsspec.available_protocols():
        try:
            fsspec.get_filesystem_class("s3")
        except ImportError:
            pass
        else:
            pytest.skip("s3fs is installed here")
    command = [
        sys.executable,
        "-m",
        "lockstep",
        "train",
        "digits",
        "--checkpoints",
        url,
        "--run",
        "mine",
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"--checkpoints {url} " in done.stderr
    assert "[unknown-checkpoint-url]" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "mine").exists()


def test_copies_need_a_run(tmp_path: Path) -> None:
    from tests.training import toy

    with refused("needs-run-directory", name="checkpoints", value=str(tmp_path)):
        lockstep.train(toy.task(), checkpoints=str(tmp_path))


def test_from_the_command_line_another_host_goes_on_and_fresh_begins_anew(tmp_path: Path) -> None:
    def train(run: str, *more: str) -> tuple[str, str]:
        command = [
            sys.executable,
            "-m",
            "lockstep",
            "train",
            "digits",
            "--exact",
            "--checkpoints",
            "copies",
            "--run",
            run,
        ]
        command += ["--steps", "6", "--checkpoint-every", "2", *more]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout.split()[-1], done.stderr

    first, said = train("one")
    assert "resumed" not in said
    copies = tmp_path / "copies"
    assert [step for step in Remote(str(copies)).steps()] == [
        folders.step_of(path) for path in folders.written(copies)
    ]
    shutil.rmtree(copies / "step-0000006")
    again, said = train("two", "--resume")
    assert "resumed from step 4 of 6" in said
    assert first == again
    anew, said = train("two", "--fresh")
    assert "resumed" not in said
    assert anew == first
    assert (
        json.loads((tmp_path / "copies" / "before-1" / "best.json").read_text())["metric"]
        == "accuracy"
    )
    assert (tmp_path / "copies" / "before-1" / "step-0000006").exists()
