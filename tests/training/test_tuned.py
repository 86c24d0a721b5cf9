"""A file of tuned settings goes there and back; anything else is refused by name."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from lockstep.errors import UsageError
from lockstep.tools.timing.output_files import check_writable
from lockstep.training.tuned import KNOBS, Tuned, TunedOn
from tests.refused import refused

MEASURED = TunedOn(
    task="digits",
    overrides={"lr": "0.1"},
    workers=2,
    device="cpu",
    torch="2.13.0",
    cpu="some CPU",
    cores=2,
    threads=1,
    seconds=60.0,
    lockstep="0.1.0",
    ratio=0.8,
)
SETTINGS = {"update": "sharded", "threads": 2, "bucket_mb": 5}


def changed(**changes: Any) -> dict[str, Any]:
    """What a file holds, with parts replaced or (None) left out; `measured__x` is x among what
    was measured.
    """
    found: dict[str, Any] = {
        "kind": "lockstep tuned settings",
        "version": 1,
        "settings": dict(SETTINGS),
        "measured": {**{name: getattr(MEASURED, name) for name in TunedOn.__dataclass_fields__}},
    }
    for name, value in changes.items():
        place, _, key = name.rpartition("__")
        where = found[place] if place else found
        if value is None:
            del where[key]
        else:
            where[key] = value
    return found


def test_there_and_back(tmp_path: Path) -> None:
    file = tmp_path / "tuned.json"
    tuned = Tuned(settings=SETTINGS, measured=MEASURED)
    tuned.write(file)
    assert Tuned.read(file) == tuned
    assert json.loads(file.read_text()) == changed()
    Tuned(settings={}, measured=MEASURED).write(file)
    assert Tuned.read(file).settings == {}


def test_the_file_knows_the_knobs_that_are_tuned() -> None:
    assert KNOBS == ("reduce", "update", "threads", "loader_workers", "bucket_mb")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"cannot be read: No such file.* \[cannot-read\]"),
        ("", r"is not JSON.* \[not-tuned-settings\]"),
        ("{", r"is not JSON.* \[not-tuned-settings\]"),
        ("\0\xff", r"is not JSON.* \[not-tuned-settings\]"),
        ("[" * 60_000, r"is not JSON.* \[not-tuned-settings\]"),
        ('{"version": ' + "9" * 5000 + "}", r"is not JSON.* \[not-tuned-settings\]"),
        (" " * 70_000, r"65536 bytes.* \[not-tuned-settings\]"),
        ("[]", r"\[not-tuned-settings\]"),
        ("{}", r"\[not-tuned-settings\]"),
        (
            '{"task": "digits", "workers": 2}',
            r"is not a file of `lockstep tune`: it lacks \"kind\".*tune.* \[not-tuned-settings\]",
        ),
        (changed(version=2), r"version=2 .* 1, .*\[settings-of-another-version\]"),
        (changed(settings=[]), r"its settings are a list.* \[not-tuned-settings\]"),
        (changed(settings=None), r"its settings are a NoneType.* \[not-tuned-settings\]"),
        (
            changed(settings__colour=1),
            (
                r"setting 'colour'; .* reduce, update, threads,"
                r" loader_workers, bucket_mb.* \[unknown-name\]"
            ),
        ),
        (
            changed(settings__workers=4),
            r"setting 'workers'; .*\[unknown-name\]",
        ),
        (
            changed(settings__micro_batch=4),
            r"\[micro-batch-in-settings\]",
        ),
        (changed(settings__threads="2"), "threads='2': give a whole number"),
        (changed(settings__threads=True), "threads=True"),
        (changed(settings__reduce=["native"]), r"reduce=\['native'\] is unknown"),
        (changed(settings__update="central"), "update='central' is unknown"),
        (changed(settings__bucket_mb=float("nan")), "bucket_mb=nan"),
        (changed(settings__bucket_mb={}), "bucket_mb={}"),
        (changed(settings__loader_workers=-1), "loader_workers=-1"),
        (changed(measured=3), r"its measured are a int.* \[not-tuned-settings\]"),
        (changed(measured__workers=None), r"measured workers is missing.* \[not-tuned-settings\]"),
        (changed(measured__workers="2"), r"measured workers is '2'.* \[not-tuned-settings\]"),
        (changed(measured__cores=True), r"measured cores is True.* \[not-tuned-settings\]"),
        (changed(measured__overrides=[]), r"measured overrides is \[\].* \[not-tuned-settings\]"),
        (
            changed(measured__moon="full"),
            r"measured value 'moon'; .*\[unknown-name\]",
        ),
    ],
)
def test_anything_else_is_refused(
    tmp_path: Path, content: str | dict[str, Any] | None, message: str
) -> None:
    file = tmp_path / "tuned.json"
    if content is not None:
        file.write_text(
            content if isinstance(content, str) else json.dumps(content), encoding="latin-1"
        )
    with pytest.raises(UsageError, match=message) as caught:
        Tuned.read(file)
    assert f"--settings {file}" in str(caught.value)


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with refused("cannot-read", file=str(tmp_path), reason="Is a directory"):
        Tuned.read(tmp_path)


def test_differences_are_named() -> None:
    assert MEASURED.differences(task="digits", workers=2, device="cpu") == []
    assert MEASURED.differences(workers=4, torch="3.0") == [
        "workers=2 there and 4 here",
        "torch=2.13.0 there and 3.0 here",
    ]


def test_whether_a_file_can_be_written_is_known_before(tmp_path: Path) -> None:
    check_writable(tmp_path / "new.json", "--out")
    assert list(tmp_path.iterdir()) == []
    old = tmp_path / "old.json"
    old.write_text("kept")
    check_writable(old, "--out")
    assert old.read_text() == "kept"
    for wrong in (tmp_path, tmp_path / "nowhere" / "x.json", old / "x.json"):
        with pytest.raises(UsageError, match=rf"--out {wrong} cannot be written: "):
            check_writable(wrong, "--out")
        with refused("cannot-write", name="--out", file=str(wrong)):
            Tuned(settings={}, measured=MEASURED).write(wrong)
    assert os.listdir(tmp_path) == ["old.json"]
