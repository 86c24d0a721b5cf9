"""`lockstep plan --methods`: a table and JSON, without any rank; wrong questions are answered
with a sentence.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lockstep.cli.app import app
from lockstep.errors import UsageError
from tests.refused import refused

SMALL = [
    "text",
    "--methods",
    "--step-ms",
    "100",
    "--set",
    "width=64",
    "--set",
    "train_bytes=9000",
    "--set",
    "eval_bytes=4000",
]
SLOW = [*SMALL, "--network", "100Mbit", "--workers", "4"]


def plan(*words: str) -> str:
    done = CliRunner().invoke(app, ["plan", *words], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def measured(tmp_path: Path, **changes: Any) -> Path:
    row = {"method": "native", "counted": 1.2e6, "mean": 0.5, "problem": None}
    more = {"method": "--sync-every 7", "counted": 0.1e6, "mean": 0.125, "problem": None}
    failed = {"method": "central", "counted": None, "mean": None, "problem": "no"}
    ddp = {"method": "torch DDP, buckets of 5 MB", "counted": None, "mean": 0.4, "problem": None}
    found = {
        "task": "text",
        "workers": 4,
        "rate": "100mbit",
        "rows": [ddp, row, more, failed],
        **changes,
    }
    file = tmp_path / "slow.json"
    file.write_text(json.dumps(found))
    return file


def test_the_table_and_the_json(tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    text = plan(*SLOW, "--json", str(out))
    assert "4 ranks, 94 Mbit/s of payload, 200 us a message" in text
    assert (
        "a rank computes 100.0 ms in a step of 2 micro-batches (given); sending gradients can overlap with 33.3 ms of it"
        in text
    )
    found = json.loads(out.read_text())
    rows = {row["method"]: row for row in found["rows"]}
    assert rows["native"]["bytes_sent"] == 1.5 * found["gradient_bytes"]
    assert rows["native"]["speedup"] == 1
    assert rows["--compress bf16"]["bytes_sent"] == 0.75 * found["gradient_bytes"]
    assert (
        rows["central"]["speedup"]
        < 1
        < rows["--compress int8"]["speedup"]
        < rows["--sync-every 500"]["speedup"]
    )
    assert [line.split("  ")[0].strip() for line in text.splitlines()[3:]] == list(rows)


def test_the_step_is_measured_where_it_is_not_given() -> None:
    words = [word for word in SLOW if word not in ("--step-ms", "100")]
    assert "(measured here, in one process)" in plan(*words)


def test_what_was_measured_stands_beside_it(tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    text = plan(*SLOW, "--measured", str(measured(tmp_path)), "--json", str(out))
    (native,) = (line for line in text.splitlines() if line.startswith("native"))
    assert native.split()[-5:] == ["1.200", "MB", "500.0", "ms", "1.00"]
    (local,) = (line for line in text.splitlines() if line.startswith("--sync-every 7"))
    assert local.split()[-5:] == ["0.100", "MB", "125.0", "ms", "4.00"]
    rows = {row["method"]: row for row in json.loads(out.read_text())["rows"]}
    assert rows["native"]["measured_seconds"] == 0.5
    assert rows["central"]["measured_seconds"] is None
    assert "torch DDP, buckets of 5 MB" not in rows


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([*SMALL, "--network", "modem"], "network='modem' is unknown. Choose one of 100Mbit"),
        ([*SMALL, "--step-ms", "0"], "step_ms=0"),
        ([*SMALL, "--step-ms", "inf"], "step_ms=inf"),
        (["txet", *SMALL[1:]], "task 'txet' is unknown"),
        (
            [*SMALL, "--measured", "/nowhere.json"],
            "--measured /nowhere.json cannot be read: No such file",
        ),
        (
            [*SMALL, "--json", "/nowhere/at/all.json"],
            "--json /nowhere/at/all.json cannot be written",
        ),
    ],
)
def test_a_wrong_question_is_one_sentence(words: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        plan(*words)


def test_a_table_of_methods_is_for_one_number_of_ranks() -> None:
    with refused("not-one-count", option="--methods", workers="2,4"):
        plan(*SMALL, "--workers", "2,4")
    with refused("wrong-type", value="0"):
        plan(*SMALL, "--workers", "0")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"workers": 2},
            (
                "holds text with 2 workers at 100mbit, but the plan is of text with 4 workers at"
                " 100 Mbit/s"
            ),
        ),
        ({"rate": "1gbit"}, "at 1gbit, but the plan"),
        ({"task": "digits"}, "holds digits with 4"),
        ({"rows": 3}, "was not written by benchmarks/slow_link.py --json"),
    ],
)
def test_another_measurement_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        plan(*SLOW, "--measured", str(measured(tmp_path, **changes)))
