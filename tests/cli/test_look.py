"""`lockstep show data` prints what data/picture.py draws, with the options as given."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from lockstep.cli.app import app
from lockstep.data import picture


@pytest.mark.parametrize(
    ("args", "options"),
    [
        ([], {"split": "interleaved"}),
        (["--split", "blocks", "--epochs", "2"], {"split": "blocks", "epochs": 2}),
        (["--drop-last", "--shuffle", "--seed", "3"], {"split": "interleaved", "drop_last": True, "shuffle": True, "seed": 3}),
    ],
)
def test_data(args: list[str], options: dict[str, object]) -> None:
    defaults = {"drop_last": False, "epochs": 1, "shuffle": False, "seed": 0}
    done = CliRunner().invoke(app, ["show", "data", "--samples", "10", "--workers", "4", *args])
    assert done.exit_code == 0, done.output
    assert done.output == picture.show(10, 4, **(defaults | options)) + "\n"  # type: ignore[arg-type]


def test_an_unknown_split_is_refused() -> None:
    done = CliRunner().invoke(app, ["show", "data", "--split", "stripes"])
    assert done.exit_code == 2
    assert "stripes" in done.output
