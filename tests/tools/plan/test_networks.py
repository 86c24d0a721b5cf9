"""Networks by name, by latency and rate, from a file of measurements, and what is no network."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from lockstep.collectives.network import Link, Network
from lockstep.errors import UsageError
from lockstep.tools.plan.networks import (
    CHOICES,
    LINKS,
    TCP,
    bits_per_second,
    connection,
    link_named,
)
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
    flat = connection("25GbE").links
    assert (flat.within, flat.between, flat.ranks_per_node) == (
        link_named("25GbE"),
        link_named("25GbE"),
        1,
    )
    nodes = connection("25GbE", 8).links
    assert nodes.between == link_named("25GbE")
    assert nodes.within.bandwidth > 3 * nodes.between.bandwidth
    assert nodes.ranks_per_node == 8


def test_a_free_network_is_free_inside_a_node_too() -> None:
    found = connection("free", 8).links
    assert found.within == found.between == link_named("free")


def test_a_network_card_a_gpu() -> None:
    one, eight = connection("nvlink+ib", 1).links, connection("NVLink+IB", 8).links
    assert eight.between.bandwidth == 8 * one.between.bandwidth
    assert connection("NVLink+IB", 8).native == ("ring", "halving_doubling")


def rows(*, latency: float = 1e-4, rate: float = 1e8, **changes: Any) -> list[dict[str, Any]]:
    sizes = (1e4, 1e6, 1e7)
    flat = Network.flat(latency, rate)
    from lockstep.collectives.algorithms import schedule

    found = [
        {
            "collective": "all_reduce",
            "algorithm": "native",
            "size": size,
            "workers": 4,
            "p50": flat.time(schedule("all_reduce", "ring", 4), size),
        }
        for size in sizes
    ]
    return [row | changes for row in found]


def written(tmp_path: Path, what: object) -> str:
    file = tmp_path / "collectives.json"
    file.write_text(json.dumps(what))
    return str(file)


def test_what_was_measured_is_fitted(tmp_path: Path) -> None:
    others = (
        rows(latency=1.0, algorithm="central")
        + rows(latency=1.0, algorithm="auto")
        + rows(latency=2.0, collective="broadcast")
    )
    found = connection(written(tmp_path, {"rows": others + rows()}))
    assert (found.links.between.latency, found.links.between.bandwidth) == pytest.approx(
        (1e-4, 1e8)
    )
    assert found.error == pytest.approx(0, abs=1e-9)
    assert "fitted to 0 %" in found.words


def test_without_the_backend_our_own_schedules_will_do(tmp_path: Path) -> None:
    found = connection(written(tmp_path, {"rows": rows(algorithm="ring")}))
    assert found.links.between.bandwidth == pytest.approx(1e8)


@pytest.mark.parametrize(
    ("what", "code"),
    [
        (3, "wrong-file"),
        ({"rows": [{"collective": "all_reduce"}]}, "wrong-file"),
        ({"rows": []}, "no-all-reduce-measured"),
        ({"rows": rows(workers=1)}, "no-all-reduce-measured"),
        ({"rows": rows(algorithm="auto")}, "no-all-reduce-measured"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, what: object, code: str) -> None:
    file = written(tmp_path, what)
    with refused(code, file=file):
        connection(file)


def test_words_of_a_file_of_another_command(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="was not written by lockstep bench collectives --json"):
        connection(written(tmp_path, 3))


@pytest.mark.parametrize(
    ("text", "code", "values"),
    [
        ("modem", "unknown-choice", {"name": "network", "value": "modem", "choices": CHOICES}),
        ("nowhere.json", "cannot-read", {"name": "--network", "file": "nowhere.json"}),
    ],
)
def test_what_is_no_network(text: str, code: str, values: dict[str, str]) -> None:
    with refused(code, **values):
        connection(text)


def test_words() -> None:
    assert connection("1Gbit").words == "1Gbit: 940 Mbit/s, 100 us a message"
    assert (
        connection("1Gbit", 4).words
        == "1Gbit: 940 Mbit/s, 100 us a message between nodes of 4, inside 95.8 Gbit/s, 5.7 us"
    )
    assert math.isinf(connection("free").links.between.bandwidth)
    assert "no limit" in connection("free").words
