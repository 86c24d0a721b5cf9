"""Checkpoints that somebody has edited and sealed again: nothing but DamagedCheckpoint or
UsageError comes of them.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import random
import shutil
import struct
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import lockstep
from lockstep.checkpoints import files, folders, manifest
from lockstep.checkpoints.manifest import MANIFEST, SEAL, STATE, measured
from lockstep.checkpoints.pieces import read_all
from lockstep.errors import DamagedCheckpoint, UsageError
from tests.checkpoints.test_checkpoints import Run
from tests.refused import refused

NUMBERS = [None, True, -1, 2.5, 10**400, float("nan"), float("inf")]
HOSTILE = [*NUMBERS, "", "x", "../../x", [], [None], {}, {"!": "tuple", "of": 3}]
Edit = Callable[[Path, random.Random], None]


@pytest.fixture
def world() -> Iterator[lockstep.World]:
    with lockstep.init() as made:
        yield made


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of checkpoints of steps 1 and 2."""
    folder = tmp_path_factory.mktemp("original")
    with lockstep.init() as world:
        Run(world, folder, every=1).train(2)
    return folder


@pytest.fixture
def saved(original: Path, tmp_path: Path) -> Path:
    """The folder of the checkpoint of step 2, to be edited."""
    shutil.copytree(original, tmp_path / "saved")
    return folders.folder_of(tmp_path / "saved", 2)


def seal(folder: Path, text: str) -> None:
    """Make a text its manifest."""
    (folder / MANIFEST).write_text(text)
    (folder / SEAL).write_text(f"{hashlib.sha256(text.encode()).hexdigest()}  {MANIFEST}\n")


def seal_again(folder: Path, edit: Callable[[Any], Any] = lambda found: found) -> None:
    """With the sizes and digests that its files have now; `edit` may change the manifest."""
    listed = json.loads((folder / MANIFEST).read_text())
    for entry in listed["files"]:
        file = folder / entry["name"]
        entry.update(bytes=file.stat().st_size, xxh3_128=measured(file).digest)
    seal(folder, json.dumps(edit(listed)))


def edited(value: Any, rng: random.Random) -> Any:
    """A copy of a JSON value with one of its parts replaced, or left out."""
    copied = copy.deepcopy(value)
    parts: list[tuple[Any, Any]] = []

    def walk(node: Any) -> None:
        keys: Iterable[Any] = ()
        if isinstance(node, dict):
            keys = node
        elif isinstance(node, list):
            keys = range(len(node))
        for key in keys:
            parts.append((node, key))
            walk(node[key])

    walk(copied)
    node, key = rng.choice(parts)
    if rng.random() < 0.2:
        del node[key]
    else:
        node[key] = rng.choice(HOSTILE)
    return copied


def edit_state(folder: Path, rng: random.Random) -> None:
    (folder / STATE).write_text(json.dumps(edited(json.loads((folder / STATE).read_text()), rng)))
    seal_again(folder)


def edit_manifest(folder: Path, rng: random.Random) -> None:
    seal_again(folder, lambda found: edited(found, rng))


def edit_header(folder: Path, rng: random.Random) -> None:
    file = rng.choice(sorted(folder.glob("*.safetensors")))
    octets = file.read_bytes()
    (size,) = struct.unpack("<Q", octets[:8])
    header = json.loads(octets[8 : 8 + size])
    shapes = json.dumps({name: [[2], [1]] for name in header})
    header.setdefault("__metadata__", {"shapes": shapes, "tied": "{}", "complex": "[]"})
    text = json.dumps(edited(header, rng)).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + octets[8 + size :])
    seal_again(folder)


def edit_bytes(folder: Path, rng: random.Random) -> None:
    file = rng.choice(sorted(folder.iterdir()))
    octets = bytearray(file.read_bytes())
    octets[rng.randrange(len(octets))] = rng.randrange(256)
    file.write_bytes(octets[: rng.choice([len(octets), rng.randrange(len(octets))])])
    if file.name not in (MANIFEST, SEAL):
        seal_again(folder)


@pytest.mark.parametrize("edit", [edit_state, edit_manifest, edit_header, edit_bytes])
def test_whatever_was_edited_is_refused_as_such(
    world: lockstep.World, saved: Path, tmp_path: Path, edit: Edit
) -> None:
    refused = 0
    for seed in range(60):
        folder = tmp_path / "hostile" / saved.name
        shutil.copytree(saved, folder)
        edit(folder, random.Random(seed))
        try:
            files.read(folder)
            Run(world, folder.parent).checkpoints.resume()
            read_all(files.read(folder).optimizer())
        except (DamagedCheckpoint, UsageError):
            refused += 1
        shutil.rmtree(folder)
    assert refused > 10


@pytest.mark.parametrize("begin", [4, 12], ids=["overlap", "hole"])
def test_tensors_that_share_bytes_or_leave_some_out_are_damage(saved: Path, begin: int) -> None:
    places = {"a": [0, 8], "b": [begin, begin + 8]}
    header = {
        name: {"dtype": "F32", "shape": [2], "data_offsets": each} for name, each in places.items()
    }
    text = json.dumps(header).encode()
    (saved / "model.safetensors").write_bytes(
        struct.pack("<Q", len(text)) + text + bytes(begin + 8)
    )
    seal_again(saved)
    found = files.read(saved)
    with refused("checkpoint-file-unreadable", DamagedCheckpoint, file="model.safetensors"):
        read_all(found.model())


@pytest.mark.parametrize("number", ["20000000", "4", "9" * 5000], ids=len)
def test_the_number_of_a_rank_in_a_name_is_below_the_number_of_files(
    world: lockstep.World, saved: Path, number: str
) -> None:
    file = saved / "optimizer-00001.safetensors"
    save_file({f"method/rank-{number}/x": torch.zeros(1)}, file)
    listed = json.loads((saved / MANIFEST).read_text())
    listed["files"].append({"name": file.name})
    (saved / MANIFEST).write_text(json.dumps(listed))
    seal_again(saved)
    assert len(files.read(saved).entries) == 4
    with refused("state-of-unknown-owner", DamagedCheckpoint, file=f"method/rank-{number}/x"):
        Run(world, saved.parent).checkpoints.resume()


def test_json_that_is_nested_too_deep_is_damage(saved: Path) -> None:
    (saved / STATE).write_text("[" * 100_000)
    seal_again(saved)
    for name in (STATE, MANIFEST):
        with pytest.raises(DamagedCheckpoint) as caught:
            files.read(saved)
        assert caught.value.file == name
        seal(saved, "[" * 100_000)


@pytest.mark.parametrize("version", [1, 3])
def test_a_checkpoint_of_another_format_is_refused(saved: Path, version: int) -> None:
    seal_again(saved, lambda listed: {**listed, "format": version})
    with refused("checkpoint-format-unknown", DamagedCheckpoint, format=version, known=2):
        files.read(saved)


@pytest.mark.parametrize("name", ["model.safetensors", STATE])
def test_a_manifest_that_leaves_a_file_out_is_refused(saved: Path, name: str) -> None:
    def leave_out(listed: Any) -> Any:
        return {**listed, "files": [entry for entry in listed["files"] if entry["name"] != name]}

    seal_again(saved, leave_out)
    reason = f"ValueError: it lists no {name.partition('.s')[0]}"
    with refused("checkpoint-file-unreadable", DamagedCheckpoint, reason=reason):
        manifest.check(saved)


def test_a_folder_that_has_the_name_of_another_step_is_refused(saved: Path) -> None:
    other = saved.rename(folders.folder_of(saved.parent, 25))
    with refused("checkpoint-of-another-step", DamagedCheckpoint, step=2):
        files.read(other)
    assert files.read(other.rename(other.with_name("renamed"))).step == 2
    newest, _ = files.newest_whole(saved.parent)
    assert newest is not None
    assert newest.step == 1


@pytest.mark.parametrize("name", [SEAL, MANIFEST, "model.safetensors", folders.BEST])
def test_a_pipe_in_place_of_a_file_is_not_waited_for(saved: Path, name: str) -> None:
    file = saved / name if name != folders.BEST else saved.parent / name
    file.unlink(missing_ok=True)
    os.mkfifo(file)
    if name == folders.BEST:
        assert files.best(saved.parent) is None
        return
    with pytest.raises(DamagedCheckpoint) as caught:
        files.read(saved)
    assert caught.value.file == name


def test_a_mark_of_the_best_that_cannot_be_read_is_none(tmp_path: Path) -> None:
    for text in ("{", "[]", '{"checkpoint": "../../elsewhere"}', '{"checkpoint": 5}'):
        (tmp_path / folders.BEST).write_text(text)
        assert files.best(tmp_path) is None


def test_a_manifest_that_names_other_files_is_refused(saved: Path) -> None:
    for name in ("../../etc/passwd", "/etc/passwd", ".hidden", ""):
        manifest.seal(saved, 2, [manifest.SealedFile(name, 1, "0" * 64)])
        with refused("checkpoint-file-unreadable", DamagedCheckpoint):
            files.read(saved)
