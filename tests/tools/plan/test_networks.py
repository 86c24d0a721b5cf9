"""Networks by name, by latency and rate, and what is no network."""

from __future__ import annotations

import math

import pytest

from lockstep.schedules.network import Link, Network
from lockstep.tools.plan.networks import LINKS, TCP, bits_per_second, connection, link_named
from tests.refused import refused


def test_names_and_numbers() -> None:
    assert link_named("100mbit").bandwidth == TCP * 12.5e6
    assert link_named("25GbE").bandwidth == TCP * 3.125e9
    assert link_named("free") == Link(0.0, math.inf)
    assert link_named("500,50Mbit") == Link(500e-6, TCP * 6.25e6)
    assert link_named("0,2.5Gbit") == Link(0.0, TCP * 312.5e6)
    assert bits_per_second("100mbit") == 100e6
    assert bits_per_second("fast") is None


@pytest.mark.parametrize(
    "text", ["", "modem", "50Mbit", "50,", "-1,1Gbit", "nan,1Gbit", "x,1Gbit", "5,0Mbit", "5,10"]
)
def test_what_is_no_network_is_refused(text: str) -> None:
    with refused("unknown-choice", name="network", value=text, choices=LINKS):
        link_named(text)


def test_a_name_is_what_leaves_a_node() -> None:
    link = link_named("25GbE")
    assert connection("25GbE") == Network(link, link, 1)
    nodes = connection("25GbE", 8)
    assert (nodes.between, nodes.ranks_per_node) == (link, 8)
    assert nodes.within.bandwidth > 3 * nodes.between.bandwidth
    free = connection("free", 8)
    assert free.within == free.between == link_named("free")
