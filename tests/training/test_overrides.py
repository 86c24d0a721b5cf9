"""--set key=value as the arguments of `task()`: whole parameters, what is inside them, and
configurations that Hydra composes.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Optional

import pytest
from omegaconf import DictConfig, OmegaConf

from lockstep.config.settings import Settings
from lockstep.errors import TaskError
from lockstep.training.overrides import arguments
from lockstep.training.resolve import located, resolve
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
    found = arguments(typed, {key: text}, "t.py", Path())[key]
    assert (found, type(found)) == (value, type(value))


def test_by_default_where_nothing_is_annotated() -> None:
    found = arguments(
        untyped, {"lr": "1", "epochs": "2", "flag": "off", "name": "x"}, "t.py", Path()
    )
    assert found == {"lr": 1.0, "epochs": 2, "flag": False, "name": "x"}
    assert isinstance(found["lr"], float)


def test_nothing_set_passes_nothing() -> None:
    assert arguments(typed, {}, "t.py", Path()) == {}


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
        arguments(function, overrides, "t.py", Path())


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
DICT_CONFIG = OmegaConf.create({**PLAIN, "double": "${inner.deep}", "open": "???"})
STRUCTURED = OmegaConf.structured(Conf)


def nested(
    plain=PLAIN,  # type: ignore[no-untyped-def]
    conf: Conf = Conf(),  # noqa: B008
    cfg: DictConfig = DICT_CONFIG,
    typed: Any = STRUCTURED,
    lr: float = 0.1,
) -> None:
    pass


def at(value: Any, path: str) -> Any:
    for each in path.split("."):
        value = getattr(value, each) if isinstance(value, Conf | Adam) else value[each]
    return value


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("plain.lr", "1", 1.0),
        ("plain.on", "no", False),
        ("plain.name", "7", "7"),
        ("plain.nothing", "0.5", 0.5),
        ("plain.nothing", "a.b", "a.b"),
        ("plain.inner.deep", "4", 4),
        ("conf.name", "7", "7"),
        ("conf.adam.lr", "1", 1.0),
        ("conf.adam.clip", "2", 2.0),
        ("cfg.lr", "1", 1.0),
        ("cfg.inner.deep", "4", 4),
        ("cfg.open", "4", 4),
        ("typed.adam.lr", "2", 2.0),
    ],
)
def test_inside_a_parameter_what_is_there_says_the_type(key: str, text: str, value: object) -> None:
    name, _, path = key.partition(".")
    given = arguments(nested, {key: text}, "t.py", Path())
    found, before = (
        given[name],
        (*nested.__defaults__,)[["plain", "conf", "cfg", "typed"].index(name)],
    )  # type: ignore[misc]
    assert list(given) == [name]
    assert (at(found, path), type(at(found, path))) == (value, type(value))
    assert type(found) is type(before)
    others = {each: each for each in ("plain.steps", "conf.adam.betas", "cfg.steps", "typed.name")}
    untouched = next(each for each in others if each.startswith(f"{name}.")).partition(".")[2]
    assert at(found, untouched) == at(before, untouched)
    assert PLAIN["lr"] == DICT_CONFIG.lr == 0.1, "the default itself was changed"


def test_an_interpolation_follows_what_was_set() -> None:
    found = arguments(nested, {"cfg.inner.deep": "4", "cfg.lr": "2"}, "t.py", Path())["cfg"]
    assert (found.double, found.lr) == (4, 2.0)
    assert arguments(nested, {"cfg.double": "5"}, "t.py", Path())["cfg"].double == 5


@pytest.mark.parametrize(
    ("key", "text", "code", "values"),
    [
        (
            "plain.inner.dep",
            "1",
            "override-unknown",
            {"key": "plain.inner.dep", "known": "plain.inner takes deep (did you mean 'deep'?)"},
        ),
        ("conf.adam.rl", "1", "override-unknown", {"known": "conf.adam takes lr, betas, clip"}),
        ("cfg.setps", "1", "override-unknown", {"file": "t.py"}),
        ("lr.x", "1", "override-unknown", {"known": "lr takes nothing"}),
        ("plian.lr", "1", "override-unknown", {"key": "plian.lr"}),
        ("plain.steps", "1.5", "override-wrong-value", {"choices": "a whole number"}),
        ("conf.adam.lr", "fast", "override-wrong-value", {"key": "conf.adam.lr"}),
        ("cfg.lr", "fast", "override-wrong-value", {"choices": "a number"}),
        ("typed.adam.clip", "x", "override-wrong-value", {"choices": "a number or none"}),
        ("conf.adam", "x", "override-wrong-value", {"choices": "a Adam, which --set cannot give"}),
    ],
)
def test_what_does_not_fit_inside_is_refused(
    key: str, text: str, code: str, values: dict[str, str]
) -> None:
    with refused(code, TaskError, **values):
        arguments(nested, {key: text}, "t.py", Path())


TASK = """
from dataclasses import replace
from omegaconf import DictConfig
from tests.training import toy
def task(cfg: DictConfig, optimizer: dict = {"lr": 0.1}):
    given = toy.task()
    def loss(output, batch):
        return given.loss(output, batch)[0] * cfg.lr * optimizer["lr"], 1
    return replace(given, loss=loss, name=f"{cfg.model.name} {cfg.lr}")
"""


@pytest.fixture
def hydra_task(tmp_path: Path) -> str:
    (tmp_path / "conf" / "model").mkdir(parents=True)
    (tmp_path / "conf" / "config.yaml").write_text("defaults: [model: small, _self_]\nlr: 0.1\n")
    for name in ("small", "big"):
        (tmp_path / "conf" / "model" / f"{name}.yaml").write_text(f"name: {name}\n")
    (tmp_path / "mine.py").write_text(TASK)
    return str(tmp_path / "mine.py")


CFG = {"cfg": "conf/config.yaml"}


def test_a_task_from_a_configuration_that_hydra_composes(
    hydra_task: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is seen from the task's folder, wherever the command is given."""
    monkeypatch.chdir("/")
    assert resolve(hydra_task, CFG).name == "small 0.1"
    chosen = {**CFG, "cfg.model": "big", "cfg.lr": "0.2"}
    assert resolve(hydra_task, chosen).name == "big 0.2"


@pytest.mark.parametrize("parameter", ["cfg: DictConfig = None", "cfg: DictConfig | None = None"])
def test_a_configuration_may_be_optional(tmp_path: Path, hydra_task: str, parameter: str) -> None:
    file = tmp_path / "optional.py"
    file.write_text(TASK.replace("cfg: DictConfig,", f"{parameter},"))
    located(str(file), {**CFG, "cfg.lr": "0.2"})
    assert resolve(str(file), {**CFG, "cfg.lr": "0.2"}).name == "small 0.2"


def test_the_settings_see_what_is_set_inside() -> None:
    for more in ({"cfg.lr": "0.2"}, {"optimizer.lr": "0.2"}):
        before, now = Settings(task="t", overrides=CFG), Settings(task="t", overrides=CFG | more)
        assert now.differences(before)


@pytest.mark.parametrize(
    ("overrides", "code", "values"),
    [
        ({}, "task-argument-missing", {"key": "cfg"}),
        ({"cfg.lr": "0.2"}, "task-argument-missing", {"key": "cfg"}),
        ({"cfg": "conf/confg.yaml"}, "cannot-read", {"name": "--set cfg"}),
        ({**CFG, "cfg.lrr": "1"}, "config-not-composed", {"overrides": ["lrr=1"]}),
        ({**CFG, "cfg.model": "tiny"}, "config-not-composed", {"overrides": ["model=tiny"]}),
        ({**CFG, "cfg.lr": "0.1,0.2"}, "config-not-composed", {"overrides": ["lr=0.1,0.2"]}),
    ],
)
def test_what_hydra_cannot_compose_is_refused(
    hydra_task: str, overrides: dict[str, str], code: str, values: dict[str, Any]
) -> None:
    with refused(code, TaskError, **values):
        resolve(hydra_task, overrides)


def test_an_unknown_key_is_refused_with_the_nearest(hydra_task: str) -> None:
    with refused("config-not-composed", TaskError) as caught:
        resolve(hydra_task, {**CFG, "cfg.model.nmae": "x"})
    assert caught.value.values["reason"].endswith("(did you mean 'model.name'?)")


def test_without_hydra_the_extra_is_named(hydra_task: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hydra", None)  # as if it were not installed
    with refused("missing-extra", TaskError, package="Hydra"):
        resolve(hydra_task, CFG)


def test_a_literal_default_is_looked_at_before_the_file_runs(tmp_path: Path) -> None:
    file = tmp_path / "t.py"
    file.write_text("def task(optimizer={'lr': 0.1}, other=compute()):\n    raise RuntimeError\n")
    located(str(file), {"optimizer.lr": "0.2", "other.anything": "1"})
    with refused("override-unknown", TaskError, known="optimizer takes lr"):
        located(str(file), {"optimizer.rate": "1"})
