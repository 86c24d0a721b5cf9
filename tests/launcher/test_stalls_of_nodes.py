"""Who is waited for where ranks are on several nodes: told, asked for, explained together."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lockstep.launcher.stall_report import RankSnapshot, Stall
from lockstep.launcher.stalls import Watcher
from lockstep.launcher.stalls_of_nodes import NodeReport, NodeReports, OtherNodes
from lockstep.runtime import processes, status
from tests import pages
from tests.launcher.sights import sight

BUCKET = "all_reduce sum f32[9] for gradient bucket 3 (layer4.weight and 1 more)"
WAITING: dict[str, Any] = {"waits": True, "number": 8, "texts": {7: "x", 8: BUCKET}}
LABELS = {"a": "anna (10.0.0.1)", "b": "bert (10.0.0.2)"}


def quiet(seconds: float, **ranks: RankSnapshot) -> NodeReport:
    return NodeReport(
        seconds,
        {int(rank.removeprefix("rank")): seen for rank, seen in ranks.items()},
        time.monotonic_ns(),
    )


def stall(told: NodeReports) -> Stall:
    found = told.explain(LABELS)
    assert found is not None
    return found


def test_the_rank_of_another_node_is_named_with_it() -> None:
    told = NodeReports()
    assert told.add("a", quiet(31, rank0=sight(**WAITING), rank1=sight(**WAITING)))
    assert told.explain(LABELS) is None
    late = RankSnapshot(
        7,
        sight(phase="data").view,
        "S",
        "dataset.py:88 read_shard",
        '  File "dataset.py", line 88, in read_shard',
    )
    assert not told.add("b", quiet(30, rank2=sight(**WAITING), rank3=late))
    found = stall(told)
    assert (found.rank, found.stack) == (3, late.stack)
    assert "ranks 0, 1 and 2 wait in #8" in found.message
    assert "dataset.py:88 read_shard" in found.message
    assert found.message.endswith("Rank 3 is on bert (10.0.0.2).")
    assert told.explain(LABELS) is None, "it is said once"


def test_where_all_wait_for_each_other_it_is_the_network() -> None:
    told = NodeReports()
    told.add("a", quiet(31, rank0=sight(**WAITING)))
    told.add("b", quiet(31, rank1=sight(**WAITING)))
    assert stall(told).message == (
        f"STALL 31 s: all ranks of all nodes wait in #8 ({BUCKET}), step 5, which does not end:"
        " look at the network."
    )


def test_ranks_that_move_again_take_back_what_was_told() -> None:
    told = NodeReports()
    told.add("a", quiet(31, rank0=sight(**WAITING)))
    told.remove("a")
    told.add("b", quiet(31, rank1=sight(phase="data")))
    assert told.explain(LABELS) is None
    told.add("a", quiet(31, rank0=sight(**WAITING)))
    assert told.explain(LABELS) is not None


def test_times_are_put_on_the_drivers_clock() -> None:
    """A node that was started an hour after the driver: its monotonic clock shows an hour less."""
    hour = 3600 * 10**9
    theirs = time.monotonic_ns() - hour
    seen = sight(phase="data")
    told = NodeReports()
    told.add(
        "a",
        NodeReport(
            31, {0: replace(seen, view=replace(seen.view, since_ns=theirs - 40 * 10**9))}, theirs
        ),
    )
    found = told.explain({"a": "anna"})
    assert found is not None
    assert "for 40 s" in found.message


def test_a_node_that_is_asked_tells_of_ranks_that_it_would_leave_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is in the user's own code between steps, and that nobody on this node waits for."""
    monkeypatch.setattr(processes, "ask_for_stack", lambda pid, file: "")
    sent: list[str] = []
    asked = OtherNodes(lambda kind, content: sent.append(kind))
    now = 0.0
    page = status.Page(status.file_of(tmp_path, 0))
    pages.step(page, 5)
    pages.enter(page, "loop")
    watcher = Watcher(tmp_path, 30, lambda: now, elsewhere=asked)
    for now in (0.0, 1.0, 31.0, 100.0):  # noqa: B007  # the watcher's clock
        assert watcher.look({0: os.getpid()}) is None
    assert sent == []
    asked.note(None)
    now = 101.0
    assert watcher.look({0: os.getpid()}) is None
    assert sent == ["quiet"]
    pages.enter(page, "data")
    now = 102.0
    watcher.look({0: os.getpid()})
    assert sent == ["quiet", "moving"]
    assert not asked.waiting
