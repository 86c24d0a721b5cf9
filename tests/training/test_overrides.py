"""--set by the parameter's type, and a sentence for everything that does not fit."""

from __future__ import annotations

from typing import Any, Literal, Optional

import pytest

from lockstep.errors import TaskError
from lockstep.training.overrides import arguments


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
    ("function", "overrides", "message"),
    [
        (
            untyped,
            {"epoch": "1"},
            (
                r"--set epoch=1: task\(\) in t.py has no parameter 'epoch'; it takes lr, epochs,"
                r" flag, name \(did you mean 'epochs'\?\)"
            ),
        ),
        (lambda: None, {"lr": "1"}, "has no parameter 'lr'; it takes nothing"),
        (typed, {"epochs": "1.5"}, "--set epochs=1.5: epochs takes a whole number"),
        (typed, {"lr": "fast"}, "--set lr=fast: lr takes a number"),
        (typed, {"flag": "maybe"}, "flag takes true or false"),
        (typed, {"mode": "c"}, "mode takes a or b or 3"),
        (typed, {"clip": "x"}, "clip takes a number or none"),
        (typed, {"layers": "1,2"}, "layers takes a list, which --set cannot give or none"),
        (
            needs,
            {"lr": "1"},
            r"task\(\) in t.py needs depth: give it a default there, or a value with --set depth=",
        ),
    ],
)
def test_what_does_not_fit_is_refused(
    function: Any, overrides: dict[str, str], message: str
) -> None:
    with pytest.raises(TaskError, match=message):
        arguments(function, overrides, "t.py")
