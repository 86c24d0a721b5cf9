"""`lockstep plan --gradient-mb`: a step of which only numbers are known, counted by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.command import command
from tests.refused import refused

GIVEN = ["--gradient-mb", "94", "--step-ms", "30", "--network", "1000,10Gbit"]


def planned(tmp_path: Path, *words: str) -> list[dict[str, Any]]:
    command("plan", *GIVEN, *words, "--json", str(tmp_path / "plan.json"))
    found: list[dict[str, Any]] = json.loads((tmp_path / "plan.json").read_text())["rows"]
    return found


def test_one_bucket_of_two_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """94 MB at 9.4 Gbit/s of payload are 80 ms; a ring of two sends them once, in two messages."""
    alone, two = planned(tmp_path, "--workers", "1,2", "--reduce", "ring")
    assert (alone["step_ms"], alone["efficiency"]) == (pytest.approx(30), 1)
    assert two["step_ms"] == pytest.approx(30 + 2 + 80)
    assert two["efficiency"] == pytest.approx(30 / 112)
    assert two["bytes_sent"] == pytest.approx(94e6)
    assert "94 MB of gradients in 1 equal buckets; every rank computes 30 ms" in (
        capsys.readouterr().out
    )


def test_two_buckets_hide_what_the_backward_covers(tmp_path: Path) -> None:
    """The first leaves when half of the backward is over: 10 + 10 ms. Each takes 2 + 40 ms."""
    (row,) = planned(tmp_path, "--workers", "2", "--buckets", "2", "--reduce", "ring")
    assert row["step_ms"] == pytest.approx(20 + 2 * 42)
    assert row["exposed_ms"] == pytest.approx(20 + 2 * 42 - 30)
    assert row["communication_ms"] == pytest.approx(2 * 42)


def test_central_waits_for_the_end_of_the_backward(tmp_path: Path) -> None:
    (row,) = planned(tmp_path, "--workers", "2", "--buckets", "2", "--reduce", "central")
    assert row["step_ms"] == pytest.approx(30 + 2 * (2 + 2 * 40))


def test_compression_and_local_steps_send_less(tmp_path: Path) -> None:
    (plain,), (half,), (tenth,) = (
        planned(tmp_path, "--workers", "4", *words)
        for words in ([], ["--compress", "bf16"], ["--sync-every", "10"])
    )
    assert plain["bytes_sent"] == pytest.approx(1.5 * 94e6)
    assert half["bytes_sent"] == pytest.approx(plain["bytes_sent"] / 2)
    assert tenth["bytes_sent"] == pytest.approx(plain["bytes_sent"] / 10)


@pytest.mark.parametrize(
    ("words", "code", "values"),
    [
        (["--gradient-mb", "9"], "option-missing", {"option": "--gradient-mb"}),
        (["digits", *GIVEN], "option-of-another-plan", {"plan": "--gradient-mb"}),
        ([*GIVEN, "--weak"], "option-of-another-plan", {"option": "--weak"}),
        ([*GIVEN, "--update", "server"], "not-planned", {"name": "update", "value": "server"}),
        ([*GIVEN, "--compress", "powersgd:4"], "powersgd-needs-shapes", {"compress": "powersgd:4"}),
        (["digits", "--buckets", "2"], "option-of-another-plan", {"option": "--buckets"}),
        ([*GIVEN, "--buckets", "0"], "wrong-value", {"name": "buckets", "value": 0}),
    ],
)
def test_what_does_not_go_together(words: list[str], code: str, values: dict[str, Any]) -> None:
    with refused(code, **values):
        command("plan", *words)
