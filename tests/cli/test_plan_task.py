"""`lockstep plan TASK`: rows and JSON from a profile that is measured; and questions that have no
answer.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lockstep.cli.app import app
from lockstep.cli.plan import counts_of
from lockstep.errors import UsageError
from lockstep.runtime.cores import cores
from tests.refused import refused


def plan(*words: str) -> str:
    done = CliRunner().invoke(app, ["plan", *words], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def test_rows_and_json_of_a_task_that_is_profiled(tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    options = ["--seconds", "0.2", "--network", "100Mbit", "--json", str(out)]
    text = plan("digits", "--workers", "1..8", *options)
    assert "digits, profiled here (" in text
    assert "1 rank alone" in text
    assert "100Mbit: 94 Mbit/s, 200 us a message" in text
    report = json.loads(out.read_text())
    assert (report["task"], report["base"], report["weak"]) == ("digits", 1, False)
    assert [row["workers"] for row in report["rows"]] == [1, 2, 4, 8]
    alone, *others = report["rows"]
    assert (alone["efficiency"], alone["bytes_sent"]) == (1, 0)
    assert {row["efficiency"] < 1 and row["bytes_sent"] > 0 for row in others} == {True}


def test_ranks_of_a_node_share_its_cores() -> None:
    text = plan("digits", "--seconds", "0.2", "--workers", "2", "--nodes-of", "2", "--weak")
    assert f"2 ranks share one host of {cores()} core" in text
    assert "between nodes of 2" in text
    assert "(weak scaling)" in text


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        ("512", [512]),
        ("4,1,2,2", [1, 2, 4]),
        ("1..4096", [2**power for power in range(13)]),
        ("3..20", [3, 6, 12]),
    ],
)
def test_numbers_of_workers(text: str, counts: list[int]) -> None:
    assert counts_of(text) == counts


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["digits", "--network", "modem"], "network='modem' is unknown. Choose one of 100Mbit"),
        (["digits", "--nodes-of", "0"], "nodes_of=0"),
        (["digits", "--seconds", "0"], "seconds=0"),
        (["digits", "--compress", "zip"], "compress='zip' is unknown"),
        (["digits", "--json", "/nowhere/at/all"], "--json /nowhere/at/all cannot be written"),
    ],
)
def test_a_value_that_cannot_work_is_one_sentence(words: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        plan(*words)


@pytest.mark.parametrize(
    ("words", "code", "values"),
    [
        ([], "option-missing", {"needed": "a TASK or --gradient-mb"}),
        (["digits", "--workers", "0"], "wrong-value", {"value": "0"}),
        (["digits", "--workers", "4..1"], "wrong-value", {"value": "4..1"}),
        (["digits", "--workers", "many"], "wrong-value", {"value": "many"}),
        (["digits", "--workers", ""], "wrong-value", {"value": ""}),
        (["digits", "--workers", "-1"], "wrong-value", {"value": "-1"}),
        (["digits", "--workers", "4097"], "too-many-ranks-to-plan", {"most": 4096}),
        (["digits", "--step-ms", "5"], "option-of-another-plan", {"option": "--step-ms"}),
        (["digits", "--update", "server"], "not-planned", {"name": "update", "value": "server"}),
        (
            ["digits", "--nodes-of", "4096", "--workers", "4096"],
            "more-ranks-than-cores",
            {"ranks": 4096, "cores": cores()},
        ),
    ],
)
def test_a_wrong_question_is_refused(words: list[str], code: str, values: dict[str, Any]) -> None:
    with refused(code, **values):
        plan(*words)
