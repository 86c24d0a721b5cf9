"""What "auto" means: a function of what is asked and nothing else; thresholds come back from a
file as they went, and bad files are refused.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lockstep.collectives.algorithms import algorithms_of
from lockstep.collectives.choose import BUILT_IN, FORMAT, Tuning
from lockstep.collectives.schedule import Kind
from tests.refused import refused

KINDS: tuple[Kind, ...] = (
    "all_reduce",
    "reduce",
    "reduce_scatter",
    "broadcast",
    "all_gather",
    "scatter",
    "gather",
    "all_to_all",
)
MEASURED = Tuning(
    {
        "all_reduce": [(1000.0, "tree"), (1e6, "native"), (float("inf"), "ring")],
        "broadcast": [(500.0, "tree")],
    },
    4,
    "t.json",
)


@pytest.mark.parametrize(
    ("kind", "bytes", "expected"),
    [
        ("all_reduce", 0, "tree"),
        ("all_reduce", 1000, "tree"),  # up to and with
        ("all_reduce", 1001, "native"),
        ("all_reduce", 10**6, "native"),
        ("all_reduce", 10**6 + 1, "ring"),
        ("all_reduce", 10**12, "ring"),
        ("broadcast", 500, "tree"),
        ("broadcast", 501, "native"),  # beyond the last threshold
        ("gather", 1, "native"),  # not measured
    ],
)
def test_thresholds(kind: Kind, bytes: int, expected: str) -> None:
    assert MEASURED.choose(kind, bytes, 4) == expected


def test_what_is_built_in() -> None:
    assert BUILT_IN.choose("all_reduce", 64 * 2**10, 2) == "recursive_doubling"
    assert BUILT_IN.choose("all_reduce", 64 * 2**10 + 1, 2) == "native"
    assert {BUILT_IN.choose(kind, 1, 2) for kind in KINDS if kind != "all_reduce"} == {"native"}


def test_one_rank_has_nobody_to_talk_to() -> None:
    assert (
        Tuning({"all_reduce": [(float("inf"), "ring")]}, 1).choose("all_reduce", 1, 1) == "native"
    )


@pytest.mark.parametrize("world", [2, 3, 5, 8])
def test_thresholds_of_another_world_do_not_count(world: int) -> None:
    for size in (1, 10**5, 10**9):
        assert MEASURED.choose("all_reduce", size, world) == BUILT_IN.choose(
            "all_reduce", size, world
        )


def test_every_answer_can_be_run() -> None:
    for tuning in (BUILT_IN, MEASURED):
        for kind in KINDS:
            for world in (1, 2, 4):
                for size in (0, 1, 10**5, 10**9):
                    assert tuning.choose(kind, size, world) in ("native", *algorithms_of(kind))


def test_equal_questions_have_equal_answers() -> None:
    """In another order, by another object, after a file: a rank's history must not count."""
    questions: list[tuple[Kind, int]] = [
        (kind, size) for kind in KINDS for size in (0, 999, 1001, 10**7)
    ]
    again = Tuning.from_json(json.loads(json.dumps(MEASURED.as_json())), "elsewhere")
    forwards = {question: MEASURED.choose(*question, 4) for question in questions}
    assert {question: again.choose(*question, 4) for question in reversed(questions)} == forwards


def test_a_file_gives_back_what_was_written(tmp_path: Path) -> None:
    file = tmp_path / "tuning.json"
    file.write_text(json.dumps(MEASURED.as_json()))
    found = Tuning.read(file)
    assert (found.table, found.world, found.source) == (MEASURED.table, 4, str(file))
    assert "Infinity" not in file.read_text()  # which is no JSON


def content(**changed: Any) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "world": 2,
        "table": {"all_reduce": [[1000, "ring"], [None, "native"]]},
    } | changed


@pytest.mark.parametrize(
    ("written", "code", "values"),
    [
        (
            "{",
            "tuning-damaged",
            {},
        ),
        (
            "[]",
            "not-a-tuning",
            {},
        ),
        (json.dumps({"rows": []}), "not-a-tuning", {}),
        (
            json.dumps(content(format="lockstep collectives tuning 2")),
            "not-a-tuning",
            {},
        ),
        (json.dumps({"format": FORMAT, "world": 2}), "tuning-damaged", {"error": "'table'"}),
        (json.dumps({"format": FORMAT, "table": {}}), "tuning-damaged", {"error": "'world'"}),
        (json.dumps(content(table=[])), "tuning-damaged", {}),
        (json.dumps(content(table={"all_reduce": [["many", "ring"]]})), "tuning-damaged", {}),
        (json.dumps(content(table={"all_reduce": [1000]})), "tuning-damaged", {}),
        (
            json.dumps(content(table={"all_reduce": [[None, "ring"], [1000, "native"]]})),
            "tuning-damaged",
            {"error": "the sizes of all_reduce are not in ascending order"},
        ),
        (
            json.dumps(content(table={"all_produce": [[None, "ring"]]})),
            "tuning-damaged",
            {"error": "'all_produce'"},
        ),
        (
            json.dumps(content(table={"broadcast": [[None, "ring"]]})),
            "unknown-algorithm",
            {"algorithm": "ring", "kind": "broadcast", "choices": ["native", "central", "tree"]},
        ),
    ],
)
def test_a_bad_file_is_refused(
    written: str, code: str, values: dict[str, Any], tmp_path: Path
) -> None:
    file = tmp_path / "t.json"
    file.write_text(written)
    with refused(code, **values) as caught:
        Tuning.read(file)
    assert str(file) in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    file = tmp_path / "nowhere.json"
    with refused("cannot-read", file=str(file), reason="No such file or directory"):
        Tuning.read(file)
