"""`lockstep show pipeline`: what tools/show/pipeline_picture.py draws, with the options as
given.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from lockstep.cli.app import app
from lockstep.errors import UsageError
from lockstep.tools.show.pipeline_picture import chart, drawing, text
from tests.cli.command import command
from tests.refused import refused


def shown(*args: str) -> str:
    done = CliRunner().invoke(app, ["show", "pipeline", *args])
    assert done.exit_code == 0, done.output
    return done.output


def test_defaults() -> None:
    assert shown() == text(chart("1f1b", 4, 8)) + "\n"


def test_options() -> None:
    found = shown(
        "--schedule", "naive", "--stages", "2", "--micro-batches", "4", "--backward", "1.5"
    )
    assert found == text(chart("naive", 2, 4, 1.5)) + "\n"


def test_a_drawing_is_written_and_said_to_be(tmp_path: Path) -> None:
    file = tmp_path / "chart.svg"
    found = shown("--schedule", "gpipe", "-n", "2", "-m", "3", "--out", str(file))
    assert found == f"{file}: gpipe: 2 ranks, 3 micro-batches; a backward takes 2 forwards\n"
    assert file.read_text() == drawing(chart("gpipe", 2, 3)).svg()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            ["--schedule", "1f2b"],
            ("schedule='1f2b' is unknown. Choose one of naive, gpipe, 1f1b"),
        ),
        (
            ["--stages", "4", "--micro-batches", "3"],
            "3 micro-batches for 4 stages, but this order needs at least as many",
        ),
        (["--backward", "0"], "backward=0"),
        (
            ["--out", "chart.pdf"],
            "--out chart.pdf has another ending than .svg. Choose one of these. [wrong-ending]",
        ),
    ],
)
def test_what_cannot_be_shown(args: list[str], message: str) -> None:
    done = CliRunner().invoke(app, ["show", "pipeline", *args])
    assert isinstance(done.exception, UsageError)
    assert message in str(done.exception)


@pytest.mark.parametrize(("option", "value"), [("--stages", 0), ("--micro-batches", -1)])
def test_at_least_one_of_each(option: str, value: int) -> None:
    with refused("wrong-value", name=option[2:].replace("-", "_"), value=value):
        command("show", "pipeline", option, str(value))
