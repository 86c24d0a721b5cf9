"""`lockstep show`: what tools/show draws, with the options as given; collectives before and
after, word for word.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lockstep.cli.app import app
from lockstep.collectives.algorithms import schedule
from lockstep.errors import UsageError
from lockstep.tools.show import data_picture as picture
from lockstep.tools.show import schedule_picture
from tests.cli.command import command
from tests.refused import refused


@pytest.mark.parametrize(
    ("args", "options"),
    [
        ([], {"split": "interleaved"}),
        (["--split", "blocks", "--epochs", "2"], {"split": "blocks", "epochs": 2}),
        (
            ["--drop-last", "--shuffle", "--seed", "3"],
            {"split": "interleaved", "drop_last": True, "shuffle": True, "seed": 3},
        ),
    ],
)
def test_data(args: list[str], options: dict[str, object]) -> None:
    defaults = {"drop_last": False, "epochs": 1, "shuffle": False, "seed": 0}
    done = CliRunner().invoke(app, ["show", "data", "--samples", "10", "--workers", "4", *args])
    assert done.exit_code == 0, done.output
    assert done.output == picture.text(picture.deal(10, 4, **(defaults | options))) + "\n"  # type: ignore[arg-type]


def test_an_unknown_split_is_refused() -> None:
    done = CliRunner().invoke(app, ["show", "data", "--split", "stripes"])
    assert done.exit_code == 2
    assert "stripes" in done.output


# -- collectives ---------------------------------------------------------------------------------


def shown(*args: str) -> str:
    done = CliRunner().invoke(app, ["show", *args])
    assert done.exit_code == 0, done.output
    return done.output


@pytest.mark.parametrize(
    "name", ["ring", "tree", "recursive-doubling", "halving-doubling", "direct", "central"]
)
def test_an_algorithm(name: str) -> None:
    drawn = schedule_picture.text(schedule("all_reduce", name.replace("-", "_"), 3))
    assert shown(name, "--workers", "3") == drawn + "\n"
    assert drawn.startswith(f"{name} all-reduce, 3 ranks: ")


def test_hierarchical_takes_the_ranks_of_a_node() -> None:
    expected = schedule_picture.text(schedule("all_reduce", "hierarchical", 6, ranks_per_node=3))
    assert shown("hierarchical", "-n", "6", "--ranks-per-node", "3") == expected + "\n"


def test_a_drawing_is_written_and_said_to_be(tmp_path: Path) -> None:
    file = tmp_path / "ring.svg"
    assert (
        shown("ring", "--out", str(file))
        == f"{file}: ring all-reduce, 4 ranks: 6 rounds, 24 messages in all\n"
    )
    assert file.read_text() == schedule_picture.drawing(schedule("all_reduce", "ring", 4)).svg()


@pytest.mark.parametrize(
    ("args", "lines"),
    [
        (
            ["all-reduce"],
            [
                "all-reduce, sum, by ring",
                "        before     after",
                "rank 0  [1 2 3]    [12 15 18]",
                "rank 1  [4 5 6]    [12 15 18]",
                "rank 2  [7 8 9]    [12 15 18]",
            ],
        ),
        (
            [
                "all-reduce",
                "--values",
                "1,2.5;3,4",
                "--op",
                "mean",
                "--algorithm",
                "recursive-doubling",
            ],
            [
                "all-reduce, mean, by recursive-doubling",
                "        before     after",
                "rank 0  [1 2.5]    [2 3.25]",
                "rank 1  [3 4]      [2 3.25]",
            ],
        ),
        (
            ["all-reduce", "--values", "1,2"],  # one rank
            ["all-reduce, sum, by ring", "        before    after", "rank 0  [1 2]     [1 2]"],
        ),
        (
            ["broadcast", "--values", "1,2;3,4", "--root", "1"],
            [
                "broadcast, root 1, by tree",
                "        before    after",
                "rank 0  [1 2]     [3 4]",
                "rank 1  [3 4]     [3 4]",
            ],
        ),
        (
            ["reduce", "--values", "1,2;3,4", "--op", "max"],
            [
                "reduce, max, root 0, by tree",
                "        before    after",
                "rank 0  [1 2]     [3 4]",
                "rank 1  [3 4]     [3 4]",
            ],
        ),
        (
            ["scatter", "--values", "1,2;3"],
            [
                "scatter, root 0, by tree",
                "        before       after",
                "rank 0  [1 2] [3]    [1 2]",
                "rank 1  nothing      [3]",
            ],
        ),
        (
            ["gather", "--values", "1,2;3", "--algorithm", "central"],
            [
                "gather, root 0, by central",
                "        before    after",
                "rank 0  [1 2]     [1 2] [3]",
                "rank 1  [3]       nothing",
            ],
        ),
        (
            ["all-gather", "--values", "1,2;3"],
            [
                "all-gather, by ring",
                "        before    after",
                "rank 0  [1 2]     [1 2] [3]",
                "rank 1  [3]       [1 2] [3]",
            ],
        ),
        (
            ["reduce-scatter", "--values", "1,2,3;4,5,6"],
            [
                "reduce-scatter, sum, by ring",
                "        before     after",
                "rank 0  [1 2 3]    [5 7]",
                "rank 1  [4 5 6]    [9]",
            ],
        ),
        (
            ["all-to-all", "--values", "1,2;3,4"],
            [
                "all-to-all, by direct",
                "        before    after",
                "rank 0  [1 2]     [1 3]",
                "rank 1  [3 4]     [2 4]",
            ],
        ),
    ],
    ids=lambda value: " ".join(value[:1]),
)
def test_a_collective(args: list[str], lines: list[str]) -> None:
    assert shown(*args).splitlines() == lines


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            ["all-reduce", "--values", "1,2;3"],
            "--values has rows of 2, 1 numbers, but all-reduce needs",
        ),
        (["all-reduce", "--op", "mean"], "op='mean' of int64 needs rounding"),
        (
            ["all-reduce", "--op", "median"],
            "op='median' is unknown. Choose one of sum, mean, max, min, prod",
        ),
        (
            ["all-reduce", "--algorithm", "rong"],
            "algorithm='rong' is unknown. Choose one of central, ring, tree",
        ),
        (
            ["all-to-all", "--values", "1,2"],
            "in an all-to-all every rank has one number for each of the 1 rank",
        ),
        (
            ["all-to-all", "--values", "1,2,3;4,5,6"],
            "in an all-to-all every rank has one number for each of the 2 ranks",
        ),
        (
            ["broadcast", "--root", "3"],
            "root 3 is not a rank of this group. Give a place in the group, from 0 to 2",
        ),
        (["ring", "--out", "ring.pdf"], "--out ring.pdf has another ending than .svg"),
    ],
)
def test_what_cannot_be_shown_is_said(args: list[str], message: str) -> None:
    done = CliRunner().invoke(app, ["show", *args])
    assert isinstance(done.exception, UsageError)
    assert message in str(done.exception)


@pytest.mark.parametrize(
    ("args", "code", "values"),
    [
        (["all-reduce", "--values", "a,b;c,d"], "wrong-value", {"value": "a,b;c,d"}),
        (["all-reduce", "--values", "1,2;"], "wrong-value", {"value": "1,2;"}),
        (["all-reduce", "--values", f"{10**20};1"], "integer-too-large", {"value": 10**20}),
        (
            ["broadcast", "--op", "sum"],
            "option-without-effect",
            {"option": "--op sum", "name": "broadcast"},
        ),
        (
            ["all-gather", "--root", "1"],
            "option-without-effect",
            {"option": "--root 1", "name": "all-gather"},
        ),
        (
            ["ring", "--ranks-per-node", "2"],
            "option-without-effect",
            {"option": "--ranks-per-node", "name": "ring"},
        ),
        (["ring", "--workers", "0"], "wrong-value", {"name": "workers", "value": 0}),
        (
            ["hierarchical", "--ranks-per-node", "0"],
            "wrong-value",
            {"name": "ranks_per_node", "value": 0},
        ),
    ],
)
def test_options_that_cannot_be_shown(args: list[str], code: str, values: dict[str, Any]) -> None:
    with refused(code, **values):
        command("show", *args)


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("rings", "ring"),
        ("all_reduce", "all-reduce"),
        ("allreduce", "all-reduce"),
        ("brodcast", "broadcast"),
        ("gater", "gather"),
    ],
)
def test_an_unknown_name_is_answered_with_the_right_one(typed: str, meant: str) -> None:
    done = CliRunner().invoke(app, ["show", typed])
    assert done.exit_code == 2
    assert f"'{typed}'" in done.output
    assert f"Did you mean '{meant}'" in done.output


# -- steps ---------------------------------------------------------------------------------------


def test_a_step_and_exact_mode() -> None:
    from lockstep.tools.show import exact_picture, step_picture

    step = step_picture.DataParallelStep.of(3, 32, 8)
    assert shown("step", "-n", "3", "--micro-batch", "8") == step_picture.text(step) + "\n"
    exact = exact_picture.ExactStep.of(6, 2)
    assert shown("exact", "-m", "6", "-n", "2") == exact_picture.text(exact) + "\n"


# -- meshes --------------------------------------------------------------------------------------


def test_a_mesh(tmp_path: Path) -> None:
    from lockstep.config.mesh import Mesh
    from lockstep.tools.show import mesh_picture
    from tests.tools.show.test_mesh_picture import drawn
    from tests.tools.show.test_mesh_picture import text as mesh_text

    assert (
        shown("mesh", "--mesh", "data=2,tensor=2", "--nodes", "2")
        == mesh_text(Mesh(data=2, tensor=2), 2) + "\n"
    )
    file = tmp_path / "mesh.svg"
    assert (
        shown("mesh", "--mesh", "shard=3", "--out", str(file))
        == f"{file}: {mesh_picture.title(Mesh(shard=3), 1)}\n"
    )
    assert file.read_text() == drawn(Mesh(shard=3)).svg()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--mesh", "data=2,rows=2"], "there is no axis 'rows'"),
        (["--mesh", "data=4", "--nodes", "3"], "--nodes 3: 4 ranks"),
        (
            ["--mesh", "data=4", "--out", "mesh.pdf"],
            "--out mesh.pdf has another ending than .svg",
        ),
    ],
)
def test_a_mesh_that_cannot_be_shown(args: list[str], message: str) -> None:
    done = CliRunner().invoke(app, ["show", "mesh", *args])
    assert isinstance(done.exception, UsageError)
    assert message in str(done.exception)


def test_the_layers_of_a_task() -> None:
    found = shown("mesh", "--mesh", "pipeline=2", "--task", "text")
    assert "rank 0   share 0 of 1: samples 0-31   stage 0 of 2: bytes" in found
    assert found.splitlines()[4].endswith("head")
