"""--set key=value as the arguments of `task()`: whole parameters, and what is inside them."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Optional

from lockstep.errors import TaskError
from lockstep.training.overrides import arguments
from lockstep.training.resolve import located
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


def test_by_annotation() -> None:
    for key, text, value in (
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
    ):
        given = arguments(typed, {key: text}, "t.py")[key]
        assert (given, type(given)) == (value, type(value)), (key, text)
    assert arguments(typed, {}, "t.py") == {}


def test_by_default_where_nothing_is_annotated() -> None:
    found = arguments(untyped, {"lr": "1", "epochs": "2", "flag": "off", "name": "x"}, "t.py")
    assert found == {"lr": 1.0, "epochs": 2, "flag": False, "name": "x"}
    assert isinstance(found["lr"], float)


def test_what_does_not_fit_is_refused() -> None:
    def wrong(key: str, value: str, choices: str) -> None:
        values = {"key": key, "value": value, "choices": choices}
        with refused("override-wrong-value", TaskError, **values):
            arguments(typed, {key: value}, "t.py")

    wrong("epochs", "1.5", "a whole number")
    wrong("lr", "fast", "a number")
    wrong("flag", "maybe", "true or false")
    wrong("mode", "c", "a or b or 3")
    wrong("clip", "x", "a number or none")
    wrong("layers", "1,2", "a list, which --set cannot give or none")
    known = "it takes lr, epochs, flag, name (did you mean 'epochs'?)"
    values = {"key": "epoch", "value": "1", "file": "t.py", "known": known}
    with refused("override-unknown", TaskError, **values):
        arguments(untyped, {"epoch": "1"}, "t.py")
    with refused("override-unknown", TaskError, key="lr", known="it takes nothing"):
        arguments(lambda: None, {"lr": "1"}, "t.py")
    with refused("task-argument-missing", TaskError, key="depth", file="t.py"):
        arguments(needs, {"lr": "1"}, "t.py")


@dataclass(frozen=True)
class Adam:
    lr: float = 0.1
    betas: tuple[float, float] = (0.9, 0.99)
    clip: float | None = None


@dataclass
class Conf:
    name: str = "x"
    adam: Adam = field(default_factory=Adam)


PLAIN = OrderedDict(lr=0.1, steps=3, on=True, name="x", nothing=None, inner={"deep": 1})


def nested(
    plain=PLAIN,  # type: ignore[no-untyped-def]
    conf: Conf = Conf(),  # noqa: B008
    lr: float = 0.1,
) -> None:
    pass


def at(value: Any, path: str) -> Any:
    for name in path.split("."):
        value = getattr(value, name) if isinstance(value, Conf | Adam) else value[name]
    return value


def test_inside_a_parameter_what_is_there_says_the_type() -> None:
    defaults = {"plain": PLAIN, "conf": Conf()}
    untouched = {"plain": "steps", "conf": "adam.betas"}
    for key, text, value in (
        ("plain.lr", "1", 1.0),
        ("plain.on", "no", False),
        ("plain.name", "7", "7"),
        ("plain.nothing", "0.5", 0.5),
        ("plain.nothing", "a.b", "a.b"),
        ("plain.inner.deep", "4", 4),
        ("conf.name", "7", "7"),
        ("conf.adam.lr", "1", 1.0),
        ("conf.adam.clip", "2", 2.0),
    ):
        name, _, path = key.partition(".")
        ((parameter, given),) = arguments(nested, {key: text}, "t.py").items()
        assert (parameter, type(given)) == (name, type(defaults[name]))
        assert (at(given, path), type(at(given, path))) == (value, type(value)), key
        assert at(given, untouched[name]) == at(defaults[name], untouched[name])
        assert PLAIN["lr"] == 0.1, "the default itself was changed"


def test_what_does_not_fit_inside_is_refused() -> None:
    inner = "plain.inner takes deep (did you mean 'deep'?)"
    for key, text, code, values in (
        ("plain.inner.dep", "1", "override-unknown", {"key": "plain.inner.dep", "known": inner}),
        ("conf.adam.rl", "1", "override-unknown", {"known": "conf.adam takes lr, betas, clip"}),
        ("lr.x", "1", "override-unknown", {"known": "lr takes nothing"}),
        ("plian.lr", "1", "override-unknown", {"key": "plian.lr"}),
        ("plain.steps", "1.5", "override-wrong-value", {"choices": "a whole number"}),
        ("conf.adam.clip", "x", "override-wrong-value", {"choices": "a number or none"}),
        ("conf.adam", "x", "override-wrong-value", {"choices": "a Adam, which --set cannot give"}),
    ):
        with refused(code, TaskError, **values):
            arguments(nested, {key: text}, "t.py")


def test_a_literal_default_is_looked_at_before_the_file_runs(tmp_path: Path) -> None:
    file = tmp_path / "t.py"
    file.write_text("def task(optimizer={'lr': 0.1}, other=compute()):\n    raise RuntimeError\n")
    located(str(file), {"optimizer.lr": "0.2", "other.anything": "1"})
    with refused("override-unknown", TaskError, known="optimizer takes lr"):
        located(str(file), {"optimizer.rate": "1"})
