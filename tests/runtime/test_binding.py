"""Which cores each rank gets, on hosts that are folders like /sys/devices/system."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.runtime import binding
from lockstep.runtime.binding import Core, Host, Node, divide, nodes_of

Written = Mapping[int, tuple[int, str]]
"""By logical core: its socket, and the hardware threads of its physical core."""


def tree(folder: Path, cores: Written, nodes: Sequence[str] = ()) -> Path:
    """Write what Linux says of these cores, and of nodes with these lists of cores."""
    for number, (socket, siblings) in cores.items():
        topology = folder / "cpu" / f"cpu{number}" / "topology"
        topology.mkdir(parents=True)
        (topology / "physical_package_id").write_text(f"{socket}\n")
        (topology / "thread_siblings_list").write_text(f"{siblings}\n")
    for number, listed in enumerate(nodes):
        (folder / "node" / f"node{number}").mkdir(parents=True)
        (folder / "node" / f"node{number}" / "cpulist").write_text(f"{listed}\n")
    return folder


TWO_SOCKETS = {number: (number % 8 // 4, f"{number % 8},{number % 8 + 8}") for number in range(16)}
"""Two sockets of four cores, each with two hardware threads: 0 and 8, 1 and 9, ..."""
EIGHT = {number: (0, str(number)) for number in range(8)}


def core(*numbers: int) -> Core:
    return frozenset(numbers)


def node(numbers: range) -> Node:
    return [core(number) for number in numbers]


@pytest.mark.parametrize("nodes", [(), ("0-3,8-11", "4-7,12-15"), ("0-15", "")])
def test_hardware_threads_are_one_core_and_sockets_are_apart(
    nodes: Sequence[str], tmp_path: Path
) -> None:
    found = nodes_of(range(16), tree(tmp_path, TWO_SOCKETS, nodes))
    first = [core(number, number + 8) for number in range(4)]
    assert found == [first, [core(number, number + 8) for number in range(4, 8)]]


def test_nodes_of_one_socket_are_apart(tmp_path: Path) -> None:
    system = tree(tmp_path, EIGHT, ["0-1,6-7", "2-5"])
    assert nodes_of(range(8), system) == [
        [core(0), core(1), core(6), core(7)],
        [core(2), core(3), core(4), core(5)],
    ]


def test_only_allowed_cores_count(tmp_path: Path) -> None:
    """As in a container with a cpuset, or under taskset."""
    system = tree(tmp_path, TWO_SOCKETS, ["0-3,8-11", "4-7,12-15"])
    assert nodes_of({2, 3, 10}, system) == [[core(2, 10), core(3)]]


def test_offline_cores_and_a_system_that_says_nothing(tmp_path: Path) -> None:
    online = {number: described for number, described in EIGHT.items() if number != 1}
    system = tree(tmp_path / "offline", online, ["0-7"])
    assert nodes_of(range(8), system) == [[core(number) for number in (0, 2, 3, 4, 5, 6, 7)]]
    assert nodes_of(range(8), tmp_path / "nowhere") == []


@pytest.mark.parametrize(
    ("nodes", "ranks", "shares"),
    [
        pytest.param([8], 3, [range(2), range(2, 5), range(5, 8)], id="cores inside a node"),
        pytest.param([4, 4], 3, [range(2), range(2, 4), range(4, 8)], id="ranks lie in one node"),
        pytest.param(
            [6, 6], 3, [range(4), range(4, 8), range(8, 12)], id="but not at the cost of cores"
        ),
        pytest.param([4, 4, 4, 4], 2, [range(8), range(8, 16)], id="several nodes for each rank"),
        pytest.param([6, 2], 2, [range(4), range(4, 8)], id="nodes of different size"),
        pytest.param([9, 1], 3, [range(3), range(3, 6), range(6, 9)], id="a core stays idle"),
        pytest.param([1, 2], 3, [range(1), range(1, 2), range(2, 3)], id="one core each"),
    ],
)
def test_shares(nodes: list[int], ranks: int, shares: list[range]) -> None:
    assert divide(_nodes(nodes), ranks) == [node(share) for share in shares]


def _nodes(sizes: Sequence[int]) -> list[Node]:
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    return [node(range(start, start + size)) for start, size in zip(starts, sizes, strict=True)]


@given(st.lists(st.integers(1, 12), min_size=1, max_size=5), st.data())
def test_no_core_is_in_two_shares_and_none_is_smaller_than_an_equal_one(
    sizes: list[int], data: st.DataObject
) -> None:
    ranks = data.draw(st.integers(1, sum(sizes)))
    shares = divide(_nodes(sizes), ranks)
    assert len(shares) == ranks
    numbers = [next(iter(core)) for share in shares for core in share]
    assert numbers == sorted(set(numbers))
    assert min(map(len, shares)) >= sum(sizes) // ranks


QUIET = Host(nodes=_nodes([4, 4]), quota=math.inf, cores_elsewhere=0, programs=lambda: 0)


@pytest.mark.parametrize(
    ("ranks", "changed", "reason"),
    [
        (2, {}, ""),
        (8, {}, ""),
        (7, {"nodes": _nodes([8])}, ""),
        (2, {"quota": 8.0}, ""),
        (2, {"programs": lambda: 1}, ""),
        (2, {"programs": lambda: 10, "cores_elsewhere": 9}, ""),
        (2, {"nodes": []}, "does not say which cores"),
        (1, {}, "one rank uses all cores"),
        (9, {}, "9 ranks are more than the physical cores"),
        (8, {"nodes": [[core(number, number + 8) for number in range(7)]]}, "8 ranks are more"),
        (8, {"nodes": _nodes([8])}, "each rank has one core"),
        (2, {"hybrid": True}, "some cores are slower"),
        (2, {"gpus": True}, "near which GPU"),
        (2, {"quota": 7.5}, "the time of 7.5 of 8 cores"),
        (2, {"programs": lambda: 2}, "other programs"),
        (2, {"programs": lambda: 1, "nodes": _nodes([4])}, "other programs"),
        (2, {"programs": lambda: 11, "cores_elsewhere": 9}, "other programs"),
    ],
)
def test_where_ranks_are_bound(ranks: int, changed: dict[str, Any], reason: str) -> None:
    said = replace(QUIET, **changed).obstacle(ranks, {"OMP_NUM_THREADS": "1"})
    assert reason in said
    assert bool(said) == bool(reason)


@pytest.mark.parametrize(
    "name", ["OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY"]
)
def test_a_choice_of_the_user_stays(name: str) -> None:
    assert QUIET.obstacle(2, {name: "false"}) == f"{name} is set"


def test_a_process_that_is_not_bound_gets_an_equal_part_of_the_cores() -> None:
    assert binding.rank_cores(1) == binding.host_cores()
    assert binding.rank_cores(10**6) == 1
