"""The cost of a collective, read off its schedule; where one round stands for many, against all
of them written out.
"""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.schedules.algorithms import schedule
from lockstep.schedules.network import Link, Network
from lockstep.schedules.schedule import Kind
from lockstep.tools.plan.carriers import NOTHING, cost

WRITTEN: list[tuple[Kind, str]] = [
    ("all_reduce", "central"),
    ("all_reduce", "ring"),
    ("all_reduce", "tree"),
    ("all_reduce", "halving_doubling"),
    ("all_reduce", "recursive_doubling"),
    ("all_gather", "ring"),
    ("reduce_scatter", "ring"),
    ("all_to_all", "direct"),
]


@given(st.sampled_from(WRITTEN), st.integers(2, 17), st.integers(1, 9), st.floats(0, 1e6))
def test_a_line_is_the_time_of_the_schedule_that_runs(
    which: tuple[Kind, str], world: int, per_node: int, bytes: float
) -> None:
    network = Network(Link(1.0, 1e4), Link(7.0, 1e2), per_node)
    written = schedule(*which, world)
    found = cost(network, *which, world)
    assert found.latency + bytes * found.per_byte == pytest.approx(
        network.time(written, bytes), rel=1e-6
    )
    assert found.rounds == len(written)


def test_what_the_busiest_rank_sends() -> None:
    for (kind, name), world in itertools.product(WRITTEN, (2, 3, 8)):
        written = schedule(kind, name, world)
        sent = [0] * world
        for transfers in written.transfers():
            for transfer in transfers:
                sent[transfer.src] += len(transfer.cells)
        cells = world if kind == "all_to_all" else written.cells
        found = cost(Network.flat(1.0, 1.0), kind, name, world)
        assert found.sends == pytest.approx(max(sent) / cells)


def test_nothing_to_send_and_a_long_latency_that_does_not_swallow_the_bandwidth() -> None:
    assert cost(Network.flat(1.0, 1.0), "all_reduce", "ring", 1) is NOTHING
    assert cost(Network.flat(1e9, 1e9), "all_reduce", "ring", 4).per_byte == pytest.approx(1.5e-9)
