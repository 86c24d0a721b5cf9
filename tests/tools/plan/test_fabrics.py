"""Networks by name, and by latency and rate."""

from __future__ import annotations

import math

import pytest

from lockstep.collectives.network import Link
from lockstep.errors import UsageError
from lockstep.tools.plan.fabrics import TCP, bits_per_second, link_named


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
    with pytest.raises(
        UsageError,
        match=rf"--network {text} is unknown: choose one of 100Mbit, 1Gbit, .* such as 500,50Mbit",
    ):
        link_named(text)
