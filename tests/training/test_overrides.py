"""--set by the parameter's type, and a sentence for everything that does not fit."""

from __future__ import annotations

from typing import Any, Literal, Optional

import pytest

from lockstep.errors import TaskError
from lockstep.training.overrides import arguments
from tests.refused import refused


def typed(
    lr: float = 0.1,
    epochs: int = 1,
    name: str = "",
    flag: bool = False,
    mode: Literal["a", "b", 3] = "a",
    clip: float | None = None,
    old: Optional[int] = None,  # noqa: UP045 - this spelling must work too
    either: int | str = 1,
    anything: Any = None,
    layers: list[int] | None = None,
) -> None:
    pass


def untyped(lr=0.1, epochs=1, flag=True, name=None):  # type: ignore[no-untyped-def]
    pass


def needs(depth: int, *, lr: float = 0.1) -> None:
    pass


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("lr", "1e-3", 1e-3),
        ("epochs", " 12 ", 12),
        ("name", "007", "007"),
        ("flag", "yes", True),
        ("flag", "False", False),
        ("mode", "b", "b"),
        ("mode", "3", 3),
        ("clip", "none", None),
        ("clip", "2", 2.0),
        ("old", "4", 4),
        ("either", "5", 5),
        ("either", "five", "five"),
        ("anything", "5", "5"),
        ("layers", "None", None),
    ],
)
def test_by_annotation(key: str, text: str, value: object) -> None:
    found = arguments(typed, {key: text}, "t.py")[key]
    assert (found, type(found)) == (value, type(value))


def test_by_default_where_nothing_is_annotated() -> None:
    found = arguments(untyped, {"lr": "1", "epochs": "2", "flag": "off", "name": "x"}, "t.py")
    assert found == {"lr": 1.0, "epochs": 2, "flag": False, "name": "x"}
    assert isinstance(found["lr"], float)


def test_nothing_set_passes_nothing() -> None:
    assert arguments(typed, {}, "t.py") == {}


@pytest.mark.parametrize(
    ("function", "overrides", "code", "values"),
    [
        (
            untyped,
            {"epoch": "1"},
            "override-unknown",
            {
                "key": "epoch",
                "value": "1",
                "file": "t.py",
                "known": "it takes lr, epochs, flag, name (did you mean 'epochs'?)",
            },
        ),
        (lambda: None, {"lr": "1"}, "override-unknown", {"key": "lr", "known": "it takes nothing"}),
        (
            typed,
            {"epochs": "1.5"},
            "override-wrong-value",
            {"key": "epochs", "value": "1.5", "choices": "a whole number"},
        ),
        (
            typed,
            {"lr": "fast"},
            "override-wrong-value",
            {"key": "lr", "value": "fast", "choices": "a number"},
        ),
        (
            typed,
            {"flag": "maybe"},
            "override-wrong-value",
            {"key": "flag", "choices": "true or false"},
        ),
        (typed, {"mode": "c"}, "override-wrong-value", {"key": "mode", "choices": "a or b or 3"}),
        (
            typed,
            {"clip": "x"},
            "override-wrong-value",
            {"key": "clip", "choices": "a number or none"},
        ),
        (
            typed,
            {"layers": "1,2"},
            "override-wrong-value",
            {"key": "layers", "choices": "a list, which --set cannot give or none"},
        ),
        (needs, {"lr": "1"}, "task-argument-missing", {"key": "depth", "file": "t.py"}),
    ],
)
def test_what_does_not_fit_is_refused(
    function: Any, overrides: dict[str, str], code: str, values: dict[str, str]
) -> None:
    with refused(code, TaskError, **values):
        arguments(function, overrides, "t.py")
