"""--multirun: which runs it becomes, and what it does not go with. tests/test_examples.py trains
one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lockstep.cli.multirun import each_run
from lockstep.config.launching import RunChoice
from lockstep.errors import TaskError
from tests.cli.command import command
from tests.refused import refused

NEW = Path("runs/t-1")


def test_each_combination_is_a_run_with_a_folder_of_its_own() -> None:
    asked = {"lr": "0.1,0.2", "cfg.sizes": "[1,2],[[3,4],5]", "data": "a/b"}
    runs = list(each_run(RunChoice(multirun=asked, overrides={"x": "1"}), NEW))
    folders = [
        "lr=0.1,cfg.sizes=[1,2],data=a_b",
        "lr=0.1,cfg.sizes=[[3,4],5],data=a_b",
        "lr=0.2,cfg.sizes=[1,2],data=a_b",
        "lr=0.2,cfg.sizes=[[3,4],5],data=a_b",
    ]
    assert [each.run for each in runs] == [NEW / name for name in folders]
    assert runs[1].overrides == {"x": "1", "lr": "0.1", "cfg.sizes": "[[3,4],5]", "data": "a/b"}
    assert not any(each.multirun for each in runs)


def test_a_given_directory_holds_the_runs_and_without_multirun_there_is_one() -> None:
    given = RunChoice(multirun={"lr": "1"}, run=Path("mine"))
    assert [each.run for each in each_run(given, NEW)] == [Path("mine/lr=1")]
    single = RunChoice(overrides={"x": "1,2"})
    assert list(each_run(single, NEW)) == [single]


def test_a_mistake_in_the_last_run_is_found_before_the_first_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with refused("override-wrong-value", TaskError):
        command("train", "digits", multirun="seed=1,O")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "code", "values"),
    [
        ({"set": "seed=1"}, "given-twice", {"name": "seed"}),
        ({"resume": True, "run": "r"}, "multirun-alone", {"other": "--resume"}),
        ({"nodes": 2, "node_rank": 0, "rdzv_endpoint": "localhost:1"}, "multirun-alone", {}),
    ],
)
def test_what_it_does_not_go_with(
    options: dict[str, Any],
    code: str,
    values: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    with refused(code, **values):
        command("train", "digits", multirun="seed=1,2", **options)
    assert not list(tmp_path.iterdir())
