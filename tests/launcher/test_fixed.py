"""Which node of a fixed set this is, from options and from variables."""

from __future__ import annotations

import pytest

from lockstep.launcher.fixed import Nodes, host_and_port
from lockstep.runtime.cores import cores
from lockstep.runtime.interfaces import towards
from lockstep.runtime.process_lifetime import PARENT
from tests.refused import refused
from tests.runtime.variables import variables

PET = variables(
    "PET_NNODES=2 PET_NPROC_PER_NODE=3 PET_NODE_RANK=1 PET_MASTER_ADDR=job-node-0-0.job"
)


def test_options_and_variables_say_the_same() -> None:
    nodes = Nodes(count=2, rank=1, host="job-node-0-0.job", port=29400, workers=3)
    assert Nodes.read(2, 1, "job-node-0-0.job:29400", "6", {}) == nodes
    assert Nodes.read(None, None, None, None, PET) == nodes
    assert Nodes.read(None, None, None, 6, PET) == nodes


def test_ranks_of_a_node() -> None:
    counts = {"auto": None, "gpu": None, "": None, "2": 2, "cpu": cores()}
    for count, workers in counts.items():
        nodes = Nodes.read(None, None, None, None, {**PET, "PET_NPROC_PER_NODE": count})
        assert nodes is not None
        assert nodes.workers == workers


def test_one_host_alone() -> None:
    assert Nodes.read(None, None, None, "4", {}) is None
    assert Nodes.read(None, None, None, None, {**PET, PARENT: "1"}) is None  # a rank's own command
    assert Nodes.read(
        None, None, None, None, {"PET_NNODES": "1", "PET_NPROC_PER_NODE": "4"}
    ) == Nodes(count=1, rank=0, host="127.0.0.1", port=29400, workers=4)


def test_options_that_do_not_add_up_are_refused_with_both_values() -> None:
    lacks = "incomplete-settings"
    with refused(lacks, given="--node-rank 1", lacking="--nodes and --rdzv-endpoint"):
        Nodes.read(None, 1, None, None, {})
    with refused(lacks, given="--rdzv-endpoint a:1"):
        Nodes.read(None, None, "a:1", None, {})
    with refused(lacks, given="--nodes 2", lacking="--node-rank and --rdzv-endpoint"):
        Nodes.read(2, None, None, None, {})
    with refused(lacks, given="--nodes 2", lacking="--rdzv-endpoint"):
        Nodes.read(2, 0, None, None, {})
    with refused("wrong-value", name="--nodes", value=0):
        Nodes.read(0, 0, "a:1", None, {})
    with refused("rank-out-of-range", name="--node-rank", value=2, size_name="--nodes", size=2):
        Nodes.read(2, 2, "a:1", None, {})
    with refused("workers-not-divisible", workers="3", nodes=2):
        Nodes.read(2, 0, "a:1", "3", {})
    with refused("workers-not-divisible", workers="1:2"):
        Nodes.read(2, 0, "a:1", "1:2", {})
    with refused("not-an-endpoint", name="--rdzv-endpoint", value="a"):
        Nodes.read(2, 0, "a", None, {})
    with refused("not-an-endpoint", value="a:99999"):
        Nodes.read(2, 0, "a:99999", None, {})


def _read(text: str, workers: str | None = None, **variables_before: str) -> Nodes | None:
    return Nodes.read(None, None, None, workers, {**variables_before, **variables(text)})


def test_variables_that_do_not_add_up_are_refused_with_both_values() -> None:
    lacks = "incomplete-settings"
    with refused(lacks, given="PET_NNODES=2", lacking="PET_NODE_RANK and PET_MASTER_ADDR"):
        _read("PET_NNODES=2")
    with refused(lacks, given="PET_NODE_RANK=1", lacking="PET_NNODES and PET_MASTER_ADDR"):
        _read("PET_NODE_RANK=1")
    with refused(lacks, given="PET_MASTER_ADDR=a", lacking="PET_NNODES and PET_NODE_RANK"):
        _read("PET_MASTER_ADDR=a")
    outside = {"name": "PET_NODE_RANK", "value": 2, "size_name": "PET_NNODES", "size": 2}
    with refused("rank-out-of-range", **outside):
        _read("PET_NODE_RANK=2", **PET)
    for count in ("two", "1:2"):
        with refused("wrong-value", name="PET_NNODES", value=count):
            _read(f"PET_NNODES={count}", **PET)
    with refused("wrong-value", name="PET_NPROC_PER_NODE", value="many"):
        _read("PET_NPROC_PER_NODE=many", **PET)
    differ = {"workers": "4", "share": 2, "each_name": "PET_NPROC_PER_NODE", "each": 3}
    with refused("workers-differ-from-variables", **differ):
        _read("", "4", **PET)
    with refused("workers-not-divisible", workers="5", name="PET_NNODES"):
        _read("", "5", **PET)


def test_addresses() -> None:
    assert host_and_port("[fd00::1]:29400", "--rdzv-endpoint") == ("fd00::1", 29400)
    assert host_and_port("node1:1", "--rdzv-endpoint") == ("node1", 1)


def test_the_way_to_an_address() -> None:
    assert towards("127.0.0.1") == "127.0.0.1"
    assert towards("::1") == "::1"
    with pytest.raises(OSError, match="not known"):
        towards("no such name.invalid")
