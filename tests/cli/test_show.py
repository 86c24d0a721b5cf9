"""`lockstep show`: what tools/show draws, with the options as given; collectives before and
after, word for word.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from lockstep.cli.app import app
from lockstep.cli.show import pipeline_chart
from lockstep.collectives import schedule
from lockstep.config.mesh import Mesh
from lockstep.tools.show import (
    data_picture,
    mesh_picture,
    pipeline_picture,
    schedule_picture,
)
from tests.cli.command import command, words_of
from tests.refused import refused
from tests.tools.show.test_mesh_picture import drawn
from tests.tools.show.test_mesh_picture import text as mesh_text


def shown(line: str) -> str:
    ended = CliRunner().invoke(app, ["show", *words_of(line)])
    assert ended.exit_code == 0, ended.output
    return ended.output


def test_options_reach_the_picture() -> None:
    data: dict[str, Any] = {"split": "interleaved", "drop_last": False, "epochs": 1}
    data |= {"shuffle": False, "seed": 0}
    for line, options in (
        ("", {}),
        ("--split blocks --epochs 2", {"split": "blocks", "epochs": 2}),
        ("--drop-last --shuffle --seed 3", {"drop_last": True, "shuffle": True, "seed": 3}),
    ):
        expected = data_picture.text(data_picture.deal(10, 4, **(data | options)))
        assert shown(f"data --samples 10 --workers 4 {line}") == expected + "\n"
    chart, naive = pipeline_chart, "--schedule naive --stages 2 --micro-batches 4"
    of_nodes = schedule("all_reduce", "hierarchical", 6, ranks_per_node=3)
    for line, expected in (
        (
            "recursive-doubling -n 3",
            schedule_picture.text(schedule("all_reduce", "recursive_doubling", 3)),
        ),
        ("hierarchical -n 6 --ranks-per-node 3", schedule_picture.text(of_nodes)),
        ("pipeline", pipeline_picture.text(chart("1f1b", 4, 8))),
        (f"pipeline {naive} --backward 1.5", pipeline_picture.text(chart("naive", 2, 4, 1.5))),
    ):
        assert shown(line) == expected + "\n"


def test_a_mesh_and_the_layers_of_a_task() -> None:
    expected = mesh_text(Mesh(data=2, tensor=2), 2)
    assert shown("mesh --mesh data=2,tensor=2 --nodes 2") == expected + "\n"
    layers = shown("mesh --mesh pipeline=2 --task text")
    assert "rank 0   share 0 of 1: samples 0-31   stage 0 of 2: bytes" in layers
    assert layers.splitlines()[4].endswith("head")


def test_a_drawing_is_written_and_said_to_be(tmp_path: Path) -> None:
    ring = schedule_picture.drawing(schedule("all_reduce", "ring", 4))
    for line, title, drawing in (
        ("ring", "ring all-reduce, 4 ranks: 6 rounds, 24 messages in all", ring),
        ("mesh --mesh shard=3", mesh_picture.title(Mesh(shard=3), 1), drawn(Mesh(shard=3))),
    ):
        file = tmp_path / "drawing.svg"
        assert shown(f"{line} --out {file}") == f"{file}: {title}\n"
        assert file.read_text() == drawing.svg()


# -- collectives ---------------------------------------------------------------------------------


PICTURES = """
$ all-reduce
all-reduce, sum, by ring
        before     after
rank 0  [1 2 3]    [12 15 18]
rank 1  [4 5 6]    [12 15 18]
rank 2  [7 8 9]    [12 15 18]

$ all-reduce --values '1,2.5;3,4' --op mean --algorithm recursive-doubling
all-reduce, mean, by recursive-doubling
        before     after
rank 0  [1 2.5]    [2 3.25]
rank 1  [3 4]      [2 3.25]

$ broadcast --values '1,2;3,4' --root 1
broadcast, root 1, by tree
        before    after
rank 0  [1 2]     [3 4]
rank 1  [3 4]     [3 4]

$ scatter --values '1,2;3'
scatter, root 0, by tree
        before       after
rank 0  [1 2] [3]    [1 2]
rank 1  nothing      [3]

$ gather --values '1,2;3' --algorithm central
gather, root 0, by central
        before    after
rank 0  [1 2]     [1 2] [3]
rank 1  [3]       nothing
"""


def test_a_collective() -> None:
    for picture in PICTURES.strip().removeprefix("$ ").split("\n\n$ "):
        line, _, text = picture.partition("\n")
        assert shown(line).rstrip("\n") == text


def test_a_collective_that_cannot_be_is_refused() -> None:
    cases: list[tuple[str, str, dict[str, Any]]] = [
        ("all-reduce --op mean", "mean-of-integers", {}),
        ("all-reduce --op median", "unknown-choice", {"name": "op", "value": "median"}),
        ("all-reduce --algorithm rong", "unknown-choice", {"value": "rong"}),
        ("all-reduce --values '1,2;3'", "rows-not-equal", {"collective": "all-reduce"}),
        ("all-reduce --values '1,2;'", "wrong-value", {"value": "1,2;"}),
        (f"all-reduce --values '{10**20};1'", "integer-too-large", {"value": 10**20}),
        ("data --samples 0", "wrong-value", {"name": "samples", "value": 0}),
        ("all-to-all --values '1,2'", "one-number-per-rank", {"ranks": 1}),
        ("broadcast --root 3", "root-outside-group", {"root": 3, "last": 2}),
    ]
    for line, code, values in cases:
        with refused(code, **values):
            command("show", *words_of(line))
