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
        limit = f"tc qdisc add dev {made[0].interface} root tbf rate 40mbit burst 32k latency 50ms"
        command = ["ip", "netns", "exec", made[0].namespace, *limit.split()]
        subprocess.run(command, check=True, capture_output=True)
        yield made


@pytest.mark.rest
def test_two_nodes_meet_and_the_slow_link_is_named(pair: list[Host], tmp_path: Path) -> None:
    """More than 5 s: eight megabytes over a slow link."""
    words = ("doctor", "--nodes=2", "--rdzv-endpoint=anna:29417", "--json=found.json")
    started = [
        host.lockstep(*words, f"--node-rank={rank}", cwd=tmp_path) for rank, host in enumerate(pair)
    ]
    (code, out, err), (other_code, other_out, _) = (node.end() for node in started)
    assert (code, other_code, other_out) == (1, 1, ""), err
    assert out.splitlines()[-2] == "not fit to train: 1 thing to fix"
    assert out.splitlines()[-1].startswith("1. links: slow link, anna to bert: ")
    found = json.loads((tmp_path / "found.json").read_text())
    assert not found["fit"]
    bandwidths = {(link["source"], link["target"]): link["bandwidth"] for link in found["links"]}
    assert set(bandwidths) == {("anna", "bert"), ("bert", "anna")}
    assert bandwidths["anna", "bert"] < 6e6


def finding(name: str, value: str, fix: str = "") -> Finding:
    return Finding(name=name, value=value, level="fix" if fix else "ok", fix=fix)


def test_what_must_be_the_same_is_one_line_and_the_rest_is_named_with_its_node() -> None:
    anna = [finding("torch", "2.13"), finding("sums", "right"), finding("limits", "64", "raise it")]
    bert = [finding("torch", "2.12"), finding("sums", "right"), finding("limits", "20000")]
    torch, sums, *limits = merged({"anna": anna, "bert": bert})
    assert torch.level == "fix"
    assert "2.13 on anna, 2.12 on bert" in torch.fix
    assert sums == anna[1]
    assert [(each.level, each.value, each.fix) for each in limits] == [
        ("fix", "anna: 64", "anna: raise it"),
        ("ok", "bert: 20000", ""),
    ]
    # what is wrong in the same way on all nodes keeps its fix
    old = [finding("torch", "2.1", "install torch 2.11 or newer")]
    assert merged({"anna": old, "bert": old}) == old


def test_clocks_that_differ_are_named() -> None:
    assert judge_clocks({"anna": 0.0, "bert": 0.002}).level == "ok"
    late = judge_clocks({"anna": 0.0, "bert": -3.2})
    assert late.level == "warn"
    assert "bert by -3.2 s" in late.fix
