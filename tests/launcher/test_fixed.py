"""Which node of a fixed set this is, from options and from variables."""

from __future__ import annotations

from typing import Any

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
    outside = {"name": "--node-rank", "value": 2, "size_name": "--nodes", "size": 2}
    cases: list[tuple[tuple[Any, ...], str, dict[str, object]]] = [
        ((None, 1, None, None), lacks, {"lacking": "--nodes and --rdzv-endpoint"}),
        ((None, None, "a:1", None), lacks, {"given": "--rdzv-endpoint a:1"}),
        ((2, None, None, None), lacks, {"lacking": "--node-rank and --rdzv-endpoint"}),
        ((2, 0, None, None), lacks, {"given": "--nodes 2", "lacking": "--rdzv-endpoint"}),
        ((0, 0, "a:1", None), "wrong-value", {"name": "--nodes", "value": 0}),
        ((2, 2, "a:1", None), "rank-out-of-range", outside),
        ((2, 0, "a:1", "3"), "workers-not-divisible", {"workers": "3", "nodes": 2}),
        ((2, 0, "a:1", "1:2"), "workers-not-divisible", {"workers": "1:2"}),
        ((2, 0, "a", None), "not-an-endpoint", {"name": "--rdzv-endpoint", "value": "a"}),
        ((2, 0, "a:99999", None), "not-an-endpoint", {"value": "a:99999"}),
    ]
    for options, code, values in cases:
        with refused(code, **values):
            Nodes.read(*options, {})


def _read(text: str, workers: str | None = None, **variables_before: str) -> Nodes | None:
    return Nodes.read(None, None, None, workers, {**variables_before, **variables(text)})


def test_variables_that_do_not_add_up_are_refused_with_both_values() -> None:
    lacking = "PET_NODE_RANK and PET_MASTER_ADDR"
    with refused("incomplete-settings", given="PET_NNODES=2", lacking=lacking):
        _read("PET_NNODES=2")
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
