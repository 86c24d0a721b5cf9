"""Knobs: what a field's annotation says, which values it takes, and that a new field is
everywhere.
"""

from __future__ import annotations

import json
import math
import runpy
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import pytest

from lockstep.cli.choices import Cluster, RunChoice
from lockstep.config import knob
from lockstep.config.documented import field_docstrings
from lockstep.config.knob import GROUPS, Knob, knobs
from lockstep.config.launching import Launch
from lockstep.config.mesh import Mesh
from lockstep.config.settings import Config, Settings
from lockstep.errors import TaskError, UsageError
from tests.cli.command import taken
from tests.refused import refused

DOCS = Path(__file__).parents[2] / "docs"
with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(DOCS / "extensions")
    CATALOGS = runpy.run_path(str(DOCS / "extensions" / "catalogs.py"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Wider(Settings):
    """With a knob more."""

    task: str = "digits"
    colour: Annotated[str, Knob("debug", unit="NAME")] = "blue"
    """Colour of the ranks."""


def test_a_new_field_is_on_the_command_line_in_settings_json_and_in_the_reference(
    tmp_path: Path,
) -> None:
    def paint(wider: Wider) -> None:
        """A command."""

    assert taken(paint, "--colour", "red")["wider"].colour == "red"
    assert taken(paint)["wider"].colour == "blue"
    (tmp_path / "paint.toml").write_text('colour = "green"\n')
    assert taken(paint, "--config", str(tmp_path / "paint.toml"))["wider"].colour == "green"
    Wider(task="digits", colour="red").write(tmp_path)
    assert json.loads((tmp_path / "settings.json").read_text())["colour"] == "red"
    assert Wider.read(tmp_path).colour == "red"
    assert "| `--colour` | `NAME` | Colour of the ranks. Default: blue. |" in CATALOGS["options"](
        Wider
    )
    with refused("wrong-value", name="colour", value=3, expected="a text"):
        Wider(task="digits", colour=3)


@pytest.mark.parametrize("cls", [RunChoice, Config, Launch, Cluster])
def test_every_field_of_a_configuration_is_a_knob_that_says_what_it_is(cls: type[Any]) -> None:
    assert list(knobs(cls)) == [field.name for field in fields(cls)]
    for field in knobs(cls).values():
        assert field.knob.group in GROUPS
        sentence = field_docstrings(cls)[field.name]
        assert sentence.endswith(".")
        assert len(sentence.split()) <= 20, field.name


@pytest.mark.parametrize(
    ("cls", "code", "values"),
    [
        (Config, "wrong-value", {"epochs": "2", "steps": 1.5, "threads": 0, "loader_workers": -1}),
        (Config, "wrong-value", {"exact": "yes", "compile": 1, "checkpoint_every": True}),
        (Config, "wrong-value", {"bucket_mb": math.inf, "sync_every": 2.0}),
        (Config, "wrong-value", {"bucket_mb": 0, "checkpoint_every": 0}),
        (Config, "unknown-choice", {"device": 1, "precision": "fp8", "reduce": "star"}),
        (partial(Settings, task="digits"), "wrong-value", {"workers": None}),
    ],
)
def test_a_value_that_its_annotation_excludes_is_refused(
    cls: Any, code: str, values: dict[str, Any]
) -> None:
    for name, value in values.items():
        with refused(code, name=name, value=value):
            cls(**{name: value})


def test_the_bounds_of_a_number_are_said() -> None:
    assert (knob.number("lr", 1, above=0, most=1), knob.whole("seed", -3, -math.inf)) == (1.0, -3)
    with refused("wrong-value", expected="a number above 0 and at most 1"):
        knob.number("share", 1.5, above=0, most=1)
    with refused("wrong-value", expected="a number of at least 0 and below 1"):
        knob.number("momentum", 1, least=0, below=1)
    with refused("wrong-value", TaskError, expected="a whole number"):
        knob.whole("seed", 0.5, -math.inf, error=TaskError)


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with refused("unknown-name", name="sync_evry", meant="did you mean sync_every?"):
        Config().replaced({"sync_evry": 4})
    with pytest.raises(UsageError, match="here: there is no option 'x'; there are one, two"):
        knob.known(["one", "two"], ["x"], "here")


def test_a_mesh_may_be_given_as_text_and_is_written_as_text(tmp_path: Path) -> None:
    settings = Settings(task="digits", workers=4, mesh="data=2,pipeline=2")
    assert settings.mesh == Mesh(data=2, pipeline=2)
    settings.write(tmp_path)
    assert json.loads((tmp_path / "settings.json").read_text())["mesh"] == "data=2,pipeline=2"
    assert Settings.read(tmp_path) == settings


def test_the_page_of_options_has_every_option_once() -> None:
    page = CATALOGS["options"](*CATALOGS["TRAIN"])
    ours = [field for cls in CATALOGS["TRAIN"] for field in knobs(cls).values()]
    for field in ours:
        flags = ", ".join(f"`{flag}`" for flag in field.flags)
        rows = [line for line in page.splitlines() if line.startswith(f"| {flags} |")]
        assert len(rows) == 1, flags
        assert field.help.replace("|", "\\|") in rows[0]
    assert sum(field.knob.common for field in ours) == 10
