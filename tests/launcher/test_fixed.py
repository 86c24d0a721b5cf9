"""Which node of a fixed set this is, from options and from variables."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.errors import UsageError
from lockstep.launcher.engine import LocalRanks
from lockstep.launcher.fixed import Nodes
from lockstep.launcher.interfaces import host_and_port, towards
from lockstep.runtime.cores import cores
from lockstep.runtime.process_lifetime import PARENT

PET = {
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "3",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "job-node-0-0.job",
}


def test_options_and_variables_say_the_same() -> None:
    by_options = Nodes.read(2, 1, "job-node-0-0.job:29400", "6", {})
    assert (
        by_options
        == Nodes.read(None, None, None, None, PET)
        == Nodes.read(None, None, None, 6, PET)
    )
    assert by_options == Nodes(count=2, rank=1, host="job-node-0-0.job", port=29400, workers=3)
    assert by_options.ranks(3) == LocalRanks(
        count=3, first_rank=3, size=6, node=1, nodes=2, address="job-node-0-0.job", port=29400
    )


@pytest.mark.parametrize(
    ("each", "workers"), [("auto", None), ("gpu", None), ("", None), ("2", 2), ("cpu", cores())]
)
def test_ranks_of_a_node(each: str, workers: int | None) -> None:
    found = Nodes.read(None, None, None, None, {**PET, "PET_NPROC_PER_NODE": each})
    assert found is not None
    assert found.workers == workers


def test_one_host_alone() -> None:
    assert Nodes.read(None, None, None, "4", {}) is None
    assert Nodes.read(None, None, None, None, {**PET, PARENT: "1"}) is None  # a rank's own command
    assert Nodes.read(
        None, None, None, None, {"PET_NNODES": "1", "PET_NPROC_PER_NODE": "4"}
    ) == Nodes(count=1, rank=0, host="127.0.0.1", port=29400, workers=4)


@pytest.mark.parametrize(
    ("given", "env", "values"),
    [
        ((None, 1, None, None), {}, ["--node-rank 1", "--nodes"]),
        ((None, None, "a:1", None), {}, ["--rdzv-endpoint a:1"]),
        ((2, None, None, None), {}, ["--nodes 2", "--node-rank", "--rdzv-endpoint"]),
        ((2, 0, None, None), {}, ["--nodes 2", "--rdzv-endpoint"]),
        ((0, 0, "a:1", None), {}, ["--nodes 0"]),
        ((2, 2, "a:1", None), {}, ["--node-rank is 2", "--nodes is 2"]),
        ((2, 0, "a:1", "3"), {}, ["--workers 3", "2 nodes"]),
        ((2, 0, "a:1", "1:2"), {}, ["--workers 1:2"]),
        ((2, 0, "a", None), {}, ["--rdzv-endpoint a:"]),
        ((2, 0, "a:99999", None), {}, ["99999"]),
        ((None,) * 4, {"PET_NNODES": "2"}, ["PET_NNODES=2", "PET_NODE_RANK", "PET_MASTER_ADDR"]),
        ((None,) * 4, {"PET_NODE_RANK": "1"}, ["PET_NODE_RANK=1", "PET_NNODES"]),
        ((None,) * 4, {"PET_MASTER_ADDR": "a"}, ["PET_MASTER_ADDR=a", "PET_NNODES"]),
        ((None,) * 4, {**PET, "PET_NODE_RANK": "2"}, ["PET_NODE_RANK is 2", "PET_NNODES is 2"]),
        ((None,) * 4, {**PET, "PET_NNODES": "two"}, ["PET_NNODES=two"]),
        ((None,) * 4, {**PET, "PET_NNODES": "1:2"}, ["PET_NNODES=1:2"]),
        ((None,) * 4, {**PET, "PET_NPROC_PER_NODE": "many"}, ["PET_NPROC_PER_NODE=many"]),
        ((None, None, None, "4"), PET, ["--workers 4", "2 a node", "PET_NPROC_PER_NODE=3"]),
        ((None, None, None, "5"), PET, ["--workers 5", "PET_NNODES"]),
    ],
)
def test_what_does_not_add_up_is_refused_with_both_values(
    given: Any, env: dict[str, str], values: list[str]
) -> None:
    with pytest.raises(UsageError) as refused:
        Nodes.read(*given, env)
    assert all(value in str(refused.value) for value in values), refused.value


def test_addresses() -> None:
    assert host_and_port("[fd00::1]:29400", "--rdzv-endpoint") == ("fd00::1", 29400)
    assert host_and_port("node1:1", "--rdzv-endpoint") == ("node1", 1)


def test_the_way_to_an_address() -> None:
    assert towards("127.0.0.1") == "127.0.0.1"
    assert towards("::1") == "::1"
    with pytest.raises(OSError, match="not known"):
        towards("no such name.invalid")
