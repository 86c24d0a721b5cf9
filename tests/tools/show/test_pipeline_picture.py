"""Clock charts: pictures at small sizes, the textbook's formulas, and the order in which ranks
really work.
"""

from __future__ import annotations

import itertools
from fractions import Fraction
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep import World
from lockstep.cli.show import pipeline_chart as chart
from lockstep.model_parallel.layers import layers_of
from lockstep.model_parallel.pipeline import Pipeline, TimedStage
from lockstep.model_parallel.schedules import NAMES, bubble
from lockstep.model_parallel.split import cut
from lockstep.model_parallel.stages import stage_module
from lockstep.tools.show.pipeline_picture import drawing, text, title
from tests.model_parallel.layered import reader, sentences
from tests.refused import refused
from tests.teams import on_team


def picture(name: str, ranks: int, micro_batches: int, backward: float = 2.0) -> str:
    return "\n" + "\n".join(
        line.replace("rank ", "")
        for line in text(chart(name, ranks, micro_batches, backward)).splitlines()
        if line.startswith("rank ")
    )


@pytest.mark.parametrize(
    ("name", "ranks", "micro_batches", "backward", "expected"),
    [
        (
            *("naive", 2, 2, 2.0),
            """
0  F0 ·  ·  ·  B0--- F1 ·  ·  ·  B1---
1  ·  F0 B0--- ·  ·  ·  F1 B1--- ·  ·""",
        ),
        (
            *("gpipe", 3, 3, 2.0),
            """
0  F0 F1 F2 ·  ·  ·  ·  ·  ·  B0--- B1--- B2---
1  ·  F0 F1 F2 ·  ·  ·  B0--- B1--- B2--- ·  ·
2  ·  ·  F0 F1 F2 B0--- B1--- B2--- ·  ·  ·  ·""",
        ),
        (
            *("1f1b", 3, 4, 2.0),
            """
0  F0 F1 F2 ·  ·  ·  ·  B0--- F3 B1--- ·  B2--- ·  B3---
1  ·  F0 F1 ·  ·  B0--- F2 B1--- F3 B2--- ·  B3--- ·  ·
2  ·  ·  F0 B0--- F1 B1--- F2 B2--- F3 B3--- ·  ·  ·  ·""",
        ),
        (
            *("1f1b", 2, 2, 1.5),  # to scale
            """
0  F0--- F1--- ·  ·  ·  B0------ ·  ·  B1------
1  ·  ·  F0--- B0------ F1--- B1------ ·  ·  ·""",
        ),
        (*("1f1b", 1, 2, 2.0), "\n0  F0 B0--- F1 B1---"),
    ],
)
def test_pictures(
    name: str, ranks: int, micro_batches: int, backward: float, expected: str
) -> None:
    assert picture(name, ranks, micro_batches, backward) == expected


def test_the_head_says_what_is_lost() -> None:
    assert title(chart("1f1b", 4, 8)) == [
        "1f1b: 4 ranks, 8 micro-batches; a backward takes 2 forwards",
        "idle 27.3% of the time; (p-1)/(m+p-1) = 27.3%",
        "activations held at most, by rank: 4 3 2 1",
    ]
    assert title(chart("gpipe", 4, 8))[2] == "activations held at most, by rank: 8 8 8 8"


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(NAMES),
    st.integers(1, 5),
    st.integers(1, 4),
    st.sampled_from([0.5, 1, 2, 3]),
)
def test_whole_rounds_wait_as_the_formula_says(
    name: str, ranks: int, rounds: int, backward: float
) -> None:
    found = chart(name, ranks, rounds * ranks, backward)
    assert found.bubble == pytest.approx(bubble(name, ranks, rounds * ranks), abs=1e-9)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(NAMES), st.integers(1, 5), st.integers(5, 9))
def test_nobody_does_two_things_at_once(name: str, ranks: int, micro_batches: int) -> None:
    for row in chart(name, ranks, micro_batches).rows:
        assert all(before.stop <= after.start for before, after in itertools.pairwise(row))
        assert sum((placed.length for placed in row), Fraction(0)) == 3 * micro_batches


def test_what_cannot_be_drawn() -> None:
    for backward in (0, -1, float("nan"), float("inf")):
        with refused("wrong-value", name="backward", value=backward):
            chart("gpipe", 2, 2, backward)
    with refused("drawing-too-large", what="4 ranks and 1509 forwards' time"):
        drawing(chart("1f1b", 4, 500))


class Recorded:
    """Writes down what torch has the stages do."""

    def __init__(self) -> None:
        self.done: list[str] = []

    def noting(self, method: str, letter: str) -> Any:
        """A patch of this method of a stage, whose second argument is the micro-batch."""
        real = getattr(TimedStage, method)

        def note(stage: Any, number: int, *args: Any, **kwargs: Any) -> Any:
            self.done.append(f"{stage.stage_index}{letter}{number}")
            return real(stage, number, *args, **kwargs)

        return mock.patch.object(TimedStage, method, note)


def recorded(world: World, names: list[str]) -> dict[str, list[str]]:
    work = {}
    for name in names:
        layers, group = layers_of(reader()), world.group
        stage = stage_module(layers, cut(layers, group.size)[group.rank])
        pipeline = Pipeline(stage, group, torch.device("cpu"), name)
        record = Recorded()
        with record.noting("forward_one_chunk", "F"), record.noting("backward_one_chunk", "B"):
            pipeline.train(sentences(6), lambda number, output: output.sum())
        work[name] = record.done
    return work


def test_the_chart_is_of_what_runs() -> None:
    names = ["gpipe", "1f1b"]  # naive is torch's gpipe, one micro-batch at a time
    ranks = on_team(recorded, 3, (names,))
    for name in names:
        expected = [
            [f"{work.stage}{work.kind}{work.micro_batch}" for work in row]
            for row in chart(name, 3, 6).rows
        ]
        assert [rank[name] for rank in ranks] == expected
