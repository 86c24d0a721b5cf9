"""`lockstep plan TASK` from a profile that was saved: rows, JSON, a picture; and questions that
have no answer.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lockstep.cli.app import app
from lockstep.errors import UsageError
from lockstep.runtime.cores import cores
from lockstep.tools.timing import profiler
from tests.refused import refused
from tests.tools.timing.profiles import profile


def plan(*words: str) -> str:
    done = CliRunner().invoke(app, ["plan", *words], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


@pytest.fixture
def saved(tmp_path: Path) -> str:
    file = tmp_path / "profile.json"
    profile().write(file)
    return str(file)


def test_rows_and_json(saved: str, tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    text = plan(
        "digits",
        "--profile",
        saved,
        "--workers",
        "1..8",
        "--network",
        "100Mbit",
        "--json",
        str(out),
    )
    assert (
        "1 rank alone, 2 threads each, 9 steps: per micro-batch loading 125.00, forward 1000.00,"
        " backward 2000.00 ms" in text
    )
    assert "buckets are complete after 50 %, 100 % of the backward" in text
    assert "100Mbit: 94 Mbit/s, 200 us a message" in text
    found = json.loads(out.read_text())
    assert [row["workers"] for row in found["rows"]] == [1, 2, 4, 8]
    efficiencies = [row["efficiency"] for row in found["rows"]]
    assert efficiencies[0] == 1
    assert efficiencies == sorted(efficiencies, reverse=True)
    assert {row["limiting"] for row in found["rows"]} == {"computation"}
    assert found["rows"][0]["step_ms"] == pytest.approx(25_750)


def test_all_ranks_on_one_host_need_the_side_that_was_measured(saved: str) -> None:
    assert "all ranks share these 2 cores" in plan(
        "digits", "--profile", saved, "--ranks-per-host", "all", "--workers", "1,2,4"
    )


def test_layouts_of_the_most_ranks_whatever_the_fewest_are(saved: str) -> None:
    assert "mesh shard=8" in plan("digits", "--profile", saved, "--workers", "2,4,8")


def test_a_picture(saved: str, tmp_path: Path) -> None:
    picture = tmp_path / "plan.svg"
    plan("digits", "--profile", saved, "--workers", "1..64", "--weak", "--out", str(picture))
    assert "weak scaling" in picture.read_text()


def test_failures_and_other_ways(saved: str) -> None:
    text = plan(
        "digits",
        "--profile",
        saved,
        "--workers",
        "8",
        "--mtbf",
        "1000",
        "--sync-every",
        "10",
        "--nodes-of",
        "4",
        "--network",
        "25GbE",
    )
    assert "goodput  save every" in text
    assert "between nodes of 4" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["digits", "--network", "modem"], "network='modem' is unknown. Choose one of here"),
        (["digits", "--nodes-of", "0"], "nodes_of=0"),
        (["digits", "--mtbf", "0"], "mtbf=0"),
        (["digits", "--mtbf", "nan"], "mtbf=nan"),
        (["digits", "--mtbf", "9", "--checkpoint-cost", "0"], "checkpoint_cost=0"),
        (["digits", "--mtbf", "9", "--restart", "-1"], "restart=-1"),
        (["digits", "--storage", "nan"], "storage=nan"),
        (["digits", "--loader-workers", "-1"], "loader_workers=-1"),
        (["digits", "--seconds", "0"], "seconds=0"),
        (["digits", "--compress", "zip"], "compress='zip' is unknown"),
        (["digits", "--mesh", "shard"], "'shard' is not a pair"),
        (["digits", "--profile", "/nowhere"], "--profile /nowhere cannot be read"),
        (["digits", "--json", "/nowhere/at/all"], "--json /nowhere/at/all cannot be written"),
        (["digits", "--plot", "plan.gif2"], "wrong-ending"),
    ],
)
def test_a_value_that_cannot_work_is_one_sentence(words: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        plan(*words)


@pytest.mark.parametrize(
    ("words", "code", "values"),
    [
        ([], "option-missing", {"needed": "a TASK, --model and --device, or --gradient-mb"}),
        (["digits", "--workers", "0"], "wrong-type", {"value": "0"}),
        (["digits", "--workers", "4..1"], "wrong-type", {"value": "4..1"}),
        (["digits", "--workers", "many"], "wrong-type", {"value": "many"}),
        (["digits", "--workers", ""], "wrong-type", {"value": ""}),
        (["digits", "--workers", "-1"], "wrong-type", {"value": "-1"}),
        (["digits", "--workers", "9999999"], "too-many-ranks-to-plan", {"most": 1048576}),
        (["digits", "--ranks-per-host", "0"], "wrong-type", {"value": "0"}),
        (["digits", "--ranks-per-host", "some"], "wrong-type", {"value": "some"}),
        (["digits", "--step-ms", "5"], "option-of-another-plan", {"option": "--step-ms"}),
        (["digits", "--batch", "5"], "option-of-another-plan", {"option": "--batch"}),
        (["digits", "--restart", "5"], "option-missing", {"needed": "--mtbf HOURS"}),
        (
            ["digits", "--network", "here", "--update", "sharded"],
            "not-on-network-here",
            {"what": "an update other than replicated, local steps or a mesh"},
        ),
        (
            ["digits", "--network", "here", "--nodes-of", "2"],
            "not-on-network-here",
            {"what": "--nodes-of 2"},
        ),
        (
            ["digits", "--network", "here", "--workers", "4096"],
            "more-ranks-than-cores",
            {"ranks": 4096, "cores": cores()},
        ),
        (
            ["digits", "--methods", "--weak"],
            "option-of-another-plan",
            {"option": "--weak", "plan": "--methods"},
        ),
        (
            ["--model", "vgg16", "--device", "p100", "--weak"],
            "option-of-another-plan",
            {"option": "--weak", "plan": "--model"},
        ),
        (
            ["--model", "vgg16"],
            "option-missing",
            {"option": "--model vgg16", "needed": "--device NAME"},
        ),
        (
            ["digits", "--model", "vgg16", "--device", "p100"],
            "option-of-another-plan",
            {"option": "TASK", "plan": "--model"},
        ),
    ],
)
def test_a_wrong_question_is_refused(words: list[str], code: str, values: dict[str, Any]) -> None:
    with refused(code, **values):
        plan(*words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--mesh", "pipeline=2"],
            r"--mesh pipeline=2 .* a task.*\[mesh-not-planned\]",
        ),
        (
            ["--mesh", "data=2,tensor=2", "--workers", "4"],
            r"--mesh data=2,tensor=2 .* a task.*\[mesh-not-planned\]",
        ),
        (
            ["--mesh", "shard=8", "--workers", "2,8"],
            r"--mesh shard=8 with --workers 2: .* multiples of 8, such as 8,16 \[mesh-workers\]",
        ),
        (
            ["--mesh", "shard=8"],
            r"--mesh shard=8 with --workers 2, 4: .* take 8 ranks.*\[mesh-workers\]",
        ),
    ],
)
def test_a_mesh_that_cannot_be_planned_is_refused_before_anything_is_measured(
    words: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiler, "profile", lambda *_, **__: pytest.fail("measured"))
    with pytest.raises(UsageError, match=message):
        plan("digits", *words)


def test_options_that_measure_do_not_go_with_a_profile(saved: str, tmp_path: Path) -> None:
    with refused("options-exclude-each-other", one="--seconds", other=f"--profile {saved}"):
        plan("digits", "--profile", saved, "--seconds", "5")
    with refused("options-exclude-each-other", one="--save-profile", other=f"--profile {saved}"):
        plan("digits", "--profile", saved, "--save-profile", str(tmp_path / "other.json"))


def test_a_profile_of_something_else_is_refused(saved: str) -> None:
    with refused(
        "profile-of-another-task", task="digits", batches=(64, 8), planned="digits", wanted=(32, 8)
    ):
        plan("digits", "--profile", saved, "--set", "global_batch=32")
