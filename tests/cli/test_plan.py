"""`lockstep plan`: a task that is measured here, or a step of which only numbers are known, counted
by hand; and questions that have no answer.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lockstep.cli.plan import counts_of
from lockstep.runtime.cores import cores
from tests.cli.command import Command, command, words_of
from tests.refused import refused


def test_rows_and_json_of_a_task_that_is_profiled(tmp_path: Path, lockstep: Command) -> None:
    options = "--seconds 0.2 --network 100Mbit --nodes-of 2 --weak --json plan.json"
    text = lockstep(f"plan digits --workers 1..8 {options}").out
    assert "digits, profiled here (" in text
    assert f"2 ranks share one host of {cores()} core" in text
    assert "100Mbit: 94 Mbit/s, 200 us a message" in text
    report = json.loads((tmp_path / "plan.json").read_text())
    assert (report["task"], report["base"], report["weak"]) == ("digits", 1, True)
    assert [row["workers"] for row in report["rows"]] == [1, 2, 4, 8]
    alone, *others = report["rows"]
    assert (alone["efficiency"], alone["bytes_sent"]) == (1, 0)
    assert {row["efficiency"] > 0 and row["bytes_sent"] > 0 for row in others} == {True}


def test_numbers_of_workers() -> None:
    assert counts_of("512") == [512]
    assert counts_of("4,1,2,2") == [1, 2, 4]
    assert counts_of("1..4096") == [2**power for power in range(13)]
    assert counts_of("3..20") == [3, 6, 12]


# -- --gradient-mb -------------------------------------------------------------------------------

GIVEN = "--gradient-mb 94 --step-ms 30 --network 1000,10Gbit"


@pytest.fixture
def planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)

    def rows(line: str) -> list[dict[str, Any]]:
        command("plan", *words_of(f"{GIVEN} {line} --json plan.json"))
        report: dict[str, Any] = json.loads((tmp_path / "plan.json").read_text())
        return list(report["rows"])

    return rows


def test_one_bucket_of_two_ranks(planned: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """94 MB at 9.4 Gbit/s of payload are 80 ms; a ring of two sends them once, in two messages."""
    alone, two = planned("--workers 1,2 --reduce ring")
    assert (alone["step_ms"], alone["efficiency"]) == (pytest.approx(30), 1)
    assert two["step_ms"] == pytest.approx(30 + 2 + 80)
    assert two["efficiency"] == pytest.approx(30 / 112)
    assert two["bytes_sent"] == pytest.approx(94e6)
    text = capsys.readouterr().out
    assert "94 MB of gradients in 1 equal buckets; every rank computes 30 ms" in text


def test_two_buckets_hide_what_the_backward_covers(planned: Any) -> None:
    """The first leaves when half of the backward is over: 10 + 10 ms. Each takes 2 + 40 ms.
    Central waits for the end of the backward.
    """
    (row,) = planned("--workers 2 --buckets 2 --reduce ring")
    assert row["step_ms"] == pytest.approx(20 + 2 * 42)
    assert row["exposed_ms"] == pytest.approx(20 + 2 * 42 - 30)
    assert row["communication_ms"] == pytest.approx(2 * 42)
    (central,) = planned("--workers 2 --buckets 2 --reduce central")
    assert central["step_ms"] == pytest.approx(30 + 2 * (2 + 2 * 40))


def test_compression_and_local_steps_send_less(planned: Any) -> None:
    (plain,), (half,), (tenth,) = (
        planned(f"--workers 4 {options}") for options in ("", "--compress bf16", "--sync-every 10")
    )
    assert plain["bytes_sent"] == pytest.approx(1.5 * 94e6)
    assert half["bytes_sent"] == pytest.approx(plain["bytes_sent"] / 2)
    assert tenth["bytes_sent"] == pytest.approx(plain["bytes_sent"] / 10)


def test_what_is_not_planned_is_refused() -> None:
    for line, code, values in (
        (f"{GIVEN} --update server", "not-planned", {"name": "update", "value": "server"}),
        (f"{GIVEN} --compress powersgd:4", "powersgd-needs-shapes", {"compress": "powersgd:4"}),
        (f"{GIVEN} --buckets 0", "wrong-value", {"name": "buckets", "value": 0}),
        ("digits --update server", "not-planned", {"name": "update", "value": "server"}),
        (
            "digits --nodes-of 4096 --workers 4096",
            "more-ranks-than-cores",
            {"ranks": 4096, "cores": cores()},
        ),
    ):
        with refused(code, **values):
            command("plan", *words_of(line))
