"""Several nodes: as a fixed set in network namespaces, and what their findings become together."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep.tools.doctor.examine import judge_clocks, merged
from lockstep.tools.finding import Finding
from tests.networks import Host, hosts


@pytest.fixture
def pair() -> Iterator[list[Host]]:
    """Two hosts, of which the first sends 40 Mbit/s at most."""
    with hosts(2) as made:
        shape = [
            "tc",
            "qdisc",
            "add",
            "dev",
            made[0].interface,
            "root",
            "tbf",
            "rate",
            "40mbit",
            "burst",
            "32k",
            "latency",
            "50ms",
        ]
        subprocess.run(
            ["ip", "netns", "exec", made[0].namespace, *shape], check=True, capture_output=True
        )
        yield made


def test_two_nodes_meet_and_the_slow_link_is_named(pair: list[Host], tmp_path: Path) -> None:
    """More than 5 s: eight megabytes over a slow link."""
    started = [
        host.lockstep(
            "doctor",
            "--nodes",
            "2",
            "--node-rank",
            str(rank),
            "--rdzv-endpoint",
            "anna:29417",
            "--json",
            "found.json",
            cwd=tmp_path,
        )
        for rank, host in enumerate(pair)
    ]
    (code, out, err), (other_code, other_out, _) = (each.end() for each in started)
    assert (code, other_code, other_out) == (1, 1, ""), err
    assert out.splitlines()[-2] == "not fit to train: 1 thing to fix"
    assert out.splitlines()[-1].startswith("1. links: slow link, anna to bert: ")
    found = json.loads((tmp_path / "found.json").read_text())
    assert not found["fit"]
    assert {(link["source"], link["target"]) for link in found["links"]} == {
        ("anna", "bert"),
        ("bert", "anna"),
    }
    slow = next(link for link in found["links"] if link["source"] == "anna")
    assert slow["bandwidth"] < 6e6


def finding(name: str, value: str, fix: str = "") -> Finding:
    return Finding(name=name, value=value, level="fix" if fix else "ok", fix=fix)


def test_what_must_be_the_same_is_one_line_and_the_rest_is_named_with_its_node() -> None:
    one, other = [
        [
            finding("torch", version),
            finding("sums", "right"),
            finding("limits", limit, fix),
        ]
        for version, limit, fix in (("2.13", "64", "raise it"), ("2.12", "20000", ""))
    ]
    torch, sums, *limits = merged({"anna": one, "bert": other})
    assert torch.level == "fix"
    assert "2.13 on anna, 2.12 on bert" in torch.fix
    assert sums == one[1]
    assert [(each.level, each.value, each.fix) for each in limits] == [
        ("fix", "anna: 64", "anna: raise it"),
        ("ok", "bert: 20000", ""),
    ]


def test_what_is_wrong_in_the_same_way_on_all_nodes_keeps_its_fix() -> None:
    old = [finding("torch", "2.1", "install torch 2.11 or newer")]
    assert merged({"anna": old, "bert": old}) == old


def test_clocks_that_differ_are_named() -> None:
    assert judge_clocks({"anna": 0.0, "bert": 0.002}).level == "ok"
    late = judge_clocks({"anna": 0.0, "bert": -3.2})
    assert late.level == "warn"
    assert "bert by -3.2 s" in late.fix
