"""`lockstep plan TASK` from a profile that was saved: rows, JSON, a picture; and questions that
have no answer.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lockstep.cli.app import app
from lockstep.errors import UsageError
from lockstep.tools.timing import profiler
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
        "1 rank alone, 2 threads each, 9 steps: a micro-batch loading 125.00, forward 1000.00,"
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
    plan("digits", "--profile", saved, "--workers", "1..64", "--weak", "--plot", str(picture))
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
        ([], r"needs a TASK \(digits, text, or a Python file\), or --model"),
        (["digits", "--workers", "0"], "--workers 0: give at least 1"),
        (["digits", "--workers", "4..1"], r"--workers 4\.\.1: give a number of ranks such as 512"),
        (["digits", "--workers", "many"], "--workers many: give a number"),
        (["digits", "--workers", ""], "--workers : give a number"),
        (["digits", "--workers", "-1"], "--workers -1: give a number"),
        (["digits", "--workers", "9999999"], "a plan goes up to 1048576 ranks"),
        (["digits", "--network", "modem"], "--network modem is unknown: choose one of here"),
        (["digits", "--nodes-of", "0"], "--nodes-of 0"),
        (["digits", "--ranks-per-host", "some"], "--ranks-per-host some: give the ranks"),
        (["digits", "--step-ms", "5"], "--step-ms does not go with the plan of a task"),
        (["digits", "--batch", "5"], "--batch does not go with the plan of a task"),
        (["digits", "--restart", "5"], "--restart is about failures: give --mtbf"),
        (["digits", "--mtbf", "0"], "--mtbf 0: give the hours"),
        (["digits", "--storage", "nan"], "storage=nan"),
        (["digits", "--loader-workers", "-1"], "loader_workers=-1"),
        (["digits", "--seconds", "0"], "seconds=0"),
        (["digits", "--compress", "zip"], "compress='zip' is unknown"),
        (["digits", "--mesh", "shard"], "is no axis"),
        (
            ["digits", "--network", "here", "--update", "sharded"],
            "--network here measures how replicas sum gradients",
        ),
        (["digits", "--network", "here", "--nodes-of", "2"], "--nodes-of 2 with --network here"),
        (
            ["digits", "--network", "here", "--workers", "4096"],
            "4096 ranks on a host like this one would take turns on [0-9]+ cores",
        ),
        (["digits", "--profile", "/nowhere"], "--profile /nowhere cannot be read"),
        (["digits", "--json", "/nowhere/at/all"], "--json /nowhere/at/all cannot be written"),
        (["digits", "--plot", "plan.gif2"], "is no kind of picture"),
        (["digits", "--methods", "--weak"], "--weak does not go with --methods"),
        (["--model", "vgg16", "--device", "p100", "--weak"], "--weak does not go with --model"),
        (["--model", "vgg16"], "--model vgg16 needs a --device"),
        (["digits", "--model", "vgg16", "--device", "p100"], "TASK does not go with --model"),
    ],
)
def test_a_wrong_question_is_one_sentence(words: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        plan(*words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--mesh", "pipeline=2"],
            (
                "--mesh pipeline=2 with the plan of a task: .*; give data and shard only, or"
                " --model and --device"
            ),
        ),
        (
            ["--mesh", "data=2,tensor=2", "--workers", "4"],
            "--mesh data=2,tensor=2 with the plan of a task",
        ),
        (
            ["--mesh", "shard=8", "--workers", "2,8"],
            "--mesh shard=8 with --workers 2: .* give multiples of 8, such as --workers 8,16, or 1",
        ),
        (["--mesh", "shard=8"], "--mesh shard=8 with --workers 2,4: shard takes 8 ranks"),
    ],
)
def test_a_mesh_that_cannot_be_planned_is_refused_before_anything_is_measured(
    words: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiler, "profile", lambda *_, **__: pytest.fail("measured"))
    with pytest.raises(UsageError, match=message):
        plan("digits", *words)


def test_options_that_measure_do_not_go_with_a_profile(saved: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--seconds with --profile .*: nothing is measured"):
        plan("digits", "--profile", saved, "--seconds", "5")
    with pytest.raises(UsageError, match=r"--save-profile with --profile"):
        plan("digits", "--profile", saved, "--save-profile", str(tmp_path / "other.json"))


def test_a_profile_of_something_else_is_refused(saved: str) -> None:
    with pytest.raises(
        UsageError,
        match=(
            r"is of digits \(global_batch=64, micro_batch=8\), and the plan of digits"
            r" \(global_batch=32"
        ),
    ):
        plan("digits", "--profile", saved, "--set", "global_batch=32")
