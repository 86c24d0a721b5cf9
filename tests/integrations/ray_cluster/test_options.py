"""Options of a job on a Ray cluster, and how it fills nodes: what needs no cluster."""

from __future__ import annotations

import pytest
import typer
from typer.main import get_command

from lockstep.cli import nodes, run
from lockstep.cli.options import spread
from lockstep.integrations.ray_cluster.cluster import connected
from lockstep.integrations.ray_cluster.members import shared
from tests.refused import refused


@pytest.mark.parametrize(
    ("given", "address", "rest"),
    [
        (["--ray", "--workers", "2", "a.py"], "auto", ["a.py"]),
        (["--ray", "h:1", "a.py", "--ray"], "h:1", ["a.py", "--ray"]),
        (["--workers", "2", "--ray", "a.py"], "auto", ["a.py"]),
        (["--ray=h:1", "a.py"], "h:1", ["a.py"]),
        (["a.py", "--ray"], None, ["a.py", "--ray"]),
        (["--ray", "ray://h:10001", "a.py"], "ray://h:10001", ["a.py"]),
    ],
)
def test_the_address_may_be_left_out_and_what_follows_the_script_is_its_own(
    given: list[str], address: str | None, rest: list[str]
) -> None:
    app = typer.Typer(add_completion=False)
    app.command(cls=run.COMMAND, context_settings=run.CONTEXT)(spread(run.run))
    context = get_command(app).make_context("run", given)
    assert (context.params["ray"], context.params["command"]) == (address, rest)


def test_a_number_of_ranks_has_to_be_given() -> None:
    with refused("option-missing", option="--ray", needed="--workers N"):
        nodes.ranks_on_ray(None)
    assert nodes.ranks_on_ray(2) == 2


@pytest.mark.parametrize(
    ("address", "code"),
    [("127.0.0.1:1", "ray-not-reachable"), ("nowhere", "not-an-endpoint")],
)
def test_a_cluster_that_is_not_there_is_refused(address: str, code: str) -> None:
    with refused(code), connected(address):
        pass


def test_nodes_are_filled_in_their_order() -> None:
    assert shared([2, 2, 2], 6) == [2, 2, 2]
    assert shared([2, 2, 2], 3) == [2, 1, 0]
    assert shared([8, 1], 4) == [4, 0]
    assert shared([1, 4], 16) == [1, 4]
    assert shared([], 2) == []
