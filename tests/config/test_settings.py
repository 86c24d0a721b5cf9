"""Settings go to JSON and back, and refuse what cannot work."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lockstep.config.settings import Settings, overrides_of
from lockstep.errors import UsageError


def test_there_and_back(tmp_path: Path) -> None:
    settings = Settings(
        task="/a/b.py",
        overrides={"lr": "0.1"},
        workers=3,
        steps=7,
        device="cpu",
        precision="bf16",
        compile=True,
        reduce="central",
        bucket_mb=0.5,
        threads=2,
        settings_file="tuned.json",
    )
    settings.write(tmp_path)
    assert Settings.read(tmp_path) == settings
    assert json.loads((tmp_path / "settings.json").read_text())["overrides"] == {"lr": "0.1"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"workers": 0}, "workers=0: give a whole number of at least 1"),
        ({"workers": None}, "workers=None"),
        ({"epochs": -1}, "epochs=-1"),
        ({"steps": 1.5}, "steps=1.5"),
        ({"epochs": 2, "steps": 3}, "epochs=2 and steps=3 exclude each other"),
        ({"loader_workers": -1}, "loader_workers=-1"),
        ({"threads": 0}, "threads=0: give a whole number of at least 1"),
        ({"threads": True}, "threads=True"),
        ({"bucket_mb": 0}, "bucket_mb=0: give a number of MiB above 0"),
        ({"bucket_mb": float("nan")}, "bucket_mb=nan"),
        ({"bucket_mb": float("inf")}, "bucket_mb=inf"),
        ({"bucket_mb": "5"}, "bucket_mb='5'"),
        ({"device": "tpu"}, "device='tpu' is unknown: choose one of auto, cpu, cuda"),
        (
            {"reduce": "star"},
            (
                "reduce='star' is unknown: choose one of auto, native, central, ring, tree,"
                " halving_doubling, "
            ),
        ),
        (
            {"reduce": "ring", "exact": True},
            "reduce='ring' with exact: it adds in an order of its own",
        ),
        ({"balance": "2,x"}, "balance='2,x': give auto, or a number for each rank"),
        (
            {"balance": "2,1", "workers": 3},
            "balance='2,1' gives 2 of 3 workers a share: give one number for each of them",
        ),
        ({"balance": "auto", "sync_every": 2}, "balance='auto' with sync_every=2"),
        (
            {"balance": "2,1", "workers": 2, "grow": True},
            "balance='2,1' has a number for each of 2 workers: give that number of workers, and no",
        ),
        ({"precision": "fp8"}, "precision='fp8' is unknown: choose one of fp32, bf16, fp16, tf32"),
    ],
)
def test_what_cannot_work_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Settings(task="digits", **changes)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot be read .*is not a run directory"),
        ("{", "cannot be read"),
        ("[]", "holds a list, not settings"),
        ("{}", "no task named"),
        ('{"task": "digits", "colour": 1, "age": 2}', "age, colour unknown to this version"),
        ('{"task": "digits", "workers": 0}', "workers=0"),
    ],
)
def test_a_foreign_file_is_refused(tmp_path: Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / "settings.json").write_text(text)
    with pytest.raises(UsageError, match=message):
        Settings.read(tmp_path)


def test_the_bucket_is_the_reducers() -> None:
    from lockstep.gradients.layout import BUCKET

    assert Settings(task="digits").bucket_mb * 2**20 == BUCKET


def test_one_host_of_several_has_no_shares_of_its_own() -> None:
    settings = Settings(task="digits", workers=4, balance="2,1,1,1")
    assert settings.on_one_host(2).balance is None


def test_overrides_are_pairs() -> None:
    assert overrides_of(["lr=0.1", " name = a=b", "empty="]) == {
        "lr": "0.1",
        "name": " a=b",
        "empty": "",
    }
    for pairs, message in (
        [["lr"], "--set lr: write it as --set key=value"],
        [["=3"], "write it"],
        [["a=1", "a=2"], "--set a is given twice"],
    ):
        with pytest.raises(UsageError, match=message):
            overrides_of(list(pairs))
