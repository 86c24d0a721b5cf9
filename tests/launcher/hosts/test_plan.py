"""The options about hosts: what they come to, and which do not go together."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.errors import UsageError
from lockstep.launcher.hosts.plan import Plan

NONE: dict[str, Any] = {
    "meet": None,
    "node_rank": None,
    "token": None,
    "workers": None,
    "workers_per_node": None,
    "join_timeout": None,
    "restarts": None,
}


def read(nodes: str | None, **options: Any) -> Plan | None:
    return Plan.read(nodes, **{**NONE, "meet": None if nodes is None else "a", **options})


def test_what_they_come_to() -> None:
    assert read(None, workers="3") is None
    plan = read("2", workers="6", node_rank=1)
    assert plan is not None
    assert (plan.least, plan.most, plan.workers, plan.node_rank, plan.restarts, plan.elastic, plan.nodes) == (2, 2, 3, 1, 0, False, "2")
    plan = read("2:4", workers_per_node=3)
    assert plan is not None
    assert (plan.least, plan.most, plan.workers, plan.restarts, plan.elastic, plan.nodes) == (2, 4, 3, 3, True, "2:4")
    assert read("3", restarts=2).restarts == 2  # type: ignore[union-attr]
    assert read("3").workers is None  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("nodes", "options", "message"),
    [
        (None, {"meet": "a"}, "--meet a is about several hosts: give --nodes too"),
        (None, {"node_rank": 0}, "--node-rank 0 is about several hosts"),
        (None, {"workers_per_node": 2}, "--workers-per-node 2 is about several hosts"),
        ("0", {}, "--nodes 0: give the number of hosts"),
        ("2:1", {}, "--nodes 2:1: give the number of hosts, or the least and the most as in 2:4"),
        ("2:", {}, "--nodes 2:"),
        ("two", {}, "--nodes two"),
        ("2", {"meet": None}, "--nodes 2: give --meet HOST"),
        ("2", {"meet": "a:x"}, "--meet a:x: port 'x'"),
        ("2", {"node_rank": 2}, "--node-rank 2 does not lie in 0..1, but --nodes is 2"),
        ("2", {"workers": "5"}, "--workers 5 cannot be shared evenly by --nodes 2: give a multiple of 2, or --workers-per-node"),
        ("2", {"workers": "1:4"}, "--workers 1:4 with --nodes 2: give a number of ranks over all hosts"),
        ("2", {"workers": "4", "workers_per_node": 2}, "--workers 4 and --workers-per-node 2 exclude each other"),
        ("1:2", {"workers": "4"}, "--workers 4 are ranks over all hosts, but --nodes 1:2 leaves their number open"),
        ("2", {"workers_per_node": 0}, "--workers-per-node 0: give at least 1"),
        ("2", {"join_timeout": 0.0}, "--join-timeout 0: give seconds, more than 0"),
    ],
)
def test_what_does_not_go_together(nodes: str | None, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read(nodes, **options)
