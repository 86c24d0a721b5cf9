"""`latest`: the newest run under runs/."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lockstep.cli.arguments import new_run, run_of
from tests.refused import refused


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_run_that_was_begun_last(folder: Path) -> None:
    for when, name in enumerate(("b", "c", "a")):
        file = folder / "runs" / name / "settings.json"
        file.parent.mkdir(parents=True)
        file.touch()
        os.utime(file, (when, when))
    (folder / "runs" / "no-run").mkdir()
    assert run_of(Path("latest")) == Path("runs/a")
    assert run_of(None) is None
    assert run_of(Path("runs/mine")) == Path("runs/mine")
    (folder / "latest").mkdir()
    assert run_of(Path("latest")) == Path("latest")


def test_without_a_run_it_is_refused(folder: Path) -> None:
    with refused("latest-run-missing", runs=Path("runs"), folder=folder):
        run_of(Path("latest"))
    with refused("option-missing", option="--run latest", needed="--resume"):
        new_run(Path("latest"))
    assert new_run(Path("mine")) == Path("mine")
