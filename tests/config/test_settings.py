"""Settings go to JSON and back, and refuse what cannot work."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lockstep.config.knob import pairs
from lockstep.config.settings import Settings
from tests.refused import refused


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
    )
    settings.write(tmp_path)
    assert Settings.read(tmp_path) == settings
    assert json.loads((tmp_path / "settings.json").read_text())["overrides"] == {"lr": "0.1"}


@pytest.mark.parametrize(
    ("changes", "code", "values"),
    [
        (
            {"workers": 0},
            "wrong-value",
            {"name": "workers", "value": 0, "expected": "a whole number of at least 1"},
        ),
        ({"workers": None}, "wrong-value", {"name": "workers", "value": None}),
        ({"epochs": -1}, "wrong-value", {"name": "epochs", "value": -1}),
        ({"steps": 1.5}, "wrong-value", {"name": "steps", "value": 1.5}),
        ({"epochs": 2, "steps": 3}, "epochs-and-steps", {"epochs": 2, "steps": 3}),
        ({"loader_workers": -1}, "wrong-value", {"name": "loader_workers", "value": -1}),
        ({"threads": 0}, "wrong-value", {"name": "threads", "value": 0}),
        ({"threads": True}, "wrong-value", {"name": "threads", "value": True}),
        (
            {"bucket_mb": 0},
            "wrong-value",
            {"name": "bucket_mb", "value": 0, "expected": "a number of MiB above 0"},
        ),
        ({"bucket_mb": float("inf")}, "wrong-value", {"value": float("inf")}),
        ({"bucket_mb": "5"}, "wrong-value", {"name": "bucket_mb", "value": "5"}),
        (
            {"device": "tpu"},
            "unknown-choice",
            {"name": "device", "value": "tpu", "choices": ["auto", "cpu", "cuda"]},
        ),
        ({"reduce": "star"}, "unknown-choice", {"name": "reduce", "value": "star"}),
        ({"reduce": "ring", "exact": True}, "exact-with-reduce", {"reduce": "ring"}),
        ({"balance": "2,x"}, "wrong-value", {"name": "balance", "value": "2,x"}),
        (
            {"balance": "2,1", "workers": 3},
            "balance-of-other-count",
            {"balance": "2,1", "given": 2, "workers": 3},
        ),
        (
            {"balance": "2,1", "workers": 2, "update": "server"},
            "balance-with-server",
            {"balance": "2,1", "update": "server"},
        ),
        (
            {"balance": "2,1", "workers": 2, "grow": True},
            "range-of-workers",
            {"name": "balance", "value": "2,1", "workers": 2},
        ),
        (
            {"mesh": "data=2", "workers": 2, "grow": True},
            "range-of-workers",
            {"name": "mesh", "value": "data=2", "workers": 2},
        ),
        (
            {"precision": "fp8"},
            "unknown-choice",
            {"name": "precision", "value": "fp8", "choices": ["fp32", "bf16", "fp16", "tf32"]},
        ),
        ({"precision": "fp16", "sync_every": 2}, "fp16-with-several-scales", {}),
        (
            {"precision": "fp16", "mesh": "tensor=2"},
            "fp16-with-several-scales",
            {"option": "mesh='tensor=2'"},
        ),
        ({"compile": True, "mesh": "tensor=2"}, "compile-with-mesh", {"mesh": "tensor=2"}),
        ({"log": "csv,x"}, "unknown-choice", {"name": "log", "value": "x"}),
        ({"log": ["csv", "csv"]}, "given-twice", {"where": "log", "name": "csv"}),
        ({"schedule": "gpipe"}, "no-pipeline", {"schedule": "gpipe"}),
    ],
)
def test_what_cannot_work_is_refused(
    changes: dict[str, Any], code: str, values: dict[str, Any]
) -> None:
    with refused(code, **values):
        Settings(task="digits", **changes)


@pytest.mark.parametrize(
    ("text", "code", "values"),
    [
        (None, "not-a-run-directory", {"file": "settings.json"}),
        ("{", "not-a-run-directory", {"file": "settings.json"}),
        ("[]", "foreign-settings", {"wrong": "it holds a list"}),
        ("{}", "foreign-settings", {"wrong": "it names no task"}),
        (
            '{"task": "digits", "colour": 1, "age": 2}',
            "foreign-settings",
            {"wrong": "it has age, colour"},
        ),
        ('{"task": "digits", "workers": 0}', "wrong-value", {"name": "workers", "value": 0}),
    ],
)
def test_a_foreign_file_is_refused(
    tmp_path: Path, text: str | None, code: str, values: dict[str, Any]
) -> None:
    if text is not None:
        (tmp_path / "settings.json").write_text(text)
    with refused(code, **values):
        Settings.read(tmp_path)


def test_the_bucket_is_the_reducers() -> None:
    from lockstep.gradients.layout import BUCKET

    assert Settings(task="digits").bucket_mb * 2**20 == BUCKET


def test_one_host_of_several_has_no_shares_of_its_own() -> None:
    settings = Settings(task="digits", workers=4, balance="2,1,1,1")
    assert settings.on_one_host(2).balance is None


def test_overrides_are_pairs() -> None:
    assert pairs(["lr=0.1", " name = a=b", "empty="], "--set") == {
        "lr": "0.1",
        "name": " a=b",
        "empty": "",
    }
    for texts, code, values in (
        (["lr"], "not-a-pair", {"where": "--set", "text": "lr"}),
        (["=3"], "not-a-pair", {"text": "=3"}),
        (["a=1", "a=2"], "given-twice", {"where": "--set", "name": "a"}),
    ):
        with refused(code, **values):
            pairs(texts, "--set")
