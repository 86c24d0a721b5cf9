"""Settings go to JSON and back, and refuse what cannot work."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lockstep.config.knob import pairs
from lockstep.config.settings import Settings
from lockstep.gradients.layout import BUCKET
from tests.refused import refused


def test_there_and_back(tmp_path: Path) -> None:
    options = {"workers": 3, "steps": 7, "precision": "bf16", "compile": True, "bucket_mb": 0.5}
    settings = Settings(task="/a/b.py", overrides={"lr": "0.1"}, reduce="central", **options)
    settings.write(tmp_path)
    assert Settings.read(tmp_path) == settings
    assert json.loads((tmp_path / "settings.json").read_text())["overrides"] == {"lr": "0.1"}
    assert Settings(task="digits").bucket_mb * 2**20 == BUCKET  # the reducers'


@pytest.mark.parametrize(
    ("changes", "code", "values"),
    [
        ({"epochs": 2, "steps": 3}, "epochs-and-steps", {"epochs": 2, "steps": 3}),
        ({"reduce": "ring", "exact": True}, "exact-with-reduce", {"reduce": "ring"}),
        ({"balance": "2,x"}, "wrong-value", {"name": "balance", "value": "2,x"}),
        ({"balance": "2,1", "workers": 3}, "balance-of-other-count", {"given": 2, "workers": 3}),
        ({"balance": "2,1", "workers": 2, "grow": True}, "range-of-workers", {"name": "balance"}),
        ({"mesh": "data=2", "workers": 2, "grow": True}, "range-of-workers", {"name": "mesh"}),
        ({"precision": "fp16", "sync_every": 2}, "fp16-with-several-scales", {}),
        ({"precision": "fp16", "mesh": "tensor=2"}, "fp16-with-several-scales", {}),
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
            '{"task": "a", "colour": 1, "age": 2}',
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
