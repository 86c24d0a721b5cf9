"""timeline.json: valid trace events, lanes in which events nest, hosts whose clocks differ put
side by side.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.training.perfetto import offsets, trace, write
from tests.training.synthetic import anatomy, begin, lines, noisy, planted

Made = dict[int, list[dict[str, Any]]]


def step(number: int = 1, **changes: Any) -> dict[str, Any]:
    times = "data forward backward exposed optimizer checks other hidden moving waits seconds"
    line = dict.fromkeys(times.split(), 0.0)
    counts = {"first": number, "last": number, "micro_batches": 1, "samples": 1}
    return {"kind": "steps", **line, **counts, **changes}


def complete(found: dict[str, Any]) -> list[dict[str, Any]]:
    return [event for event in found["traceEvents"] if event["ph"] == "X"]


def assert_valid(found: dict[str, Any]) -> None:
    """The trace-event format: M names what it names, X has a start and a duration, and on one
    lane events nest.
    """
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    lanes: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for event in found["traceEvents"]:
        assert event["ph"] in "MX"
        assert all(type(event[name]) is int for name in ("pid", "tid"))
        if event["ph"] == "M":
            what, _, aspect = event["name"].partition("_")
            assert what in ("process", "thread")
            assert aspect in ("name", "sort_index")
            continue
        assert isinstance(event["name"], str)
        assert event["ts"] >= 0
        assert event["dur"] >= 0
        lanes.setdefault((event["pid"], event["tid"]), []).append(event)
    for events in lanes.values():
        assert_nests(events)


def assert_nests(events: Iterable[dict[str, Any]]) -> None:
    ends: list[float] = []
    for event in sorted(events, key=lambda each: (each["ts"], -each["dur"])):
        while ends and ends[-1] <= event["ts"]:
            ends.pop()
        assert not ends or event["ts"] + event["dur"] <= ends[-1], event
        ends.append(event["ts"] + event["dur"])


def named(found: dict[str, Any], kind: str) -> list[Any]:
    """What the events of this kind name."""
    return [event["args"]["name"] for event in found["traceEvents"] if event["name"] == kind]


def test_a_lane_for_phases_and_one_for_buckets() -> None:
    found = trace(anatomy(lines(2, 2, spans=True)))
    assert_valid(found)
    assert named(found, "thread_name") == ["phases", "buckets"] * 2
    assert named(found, "process_name") == ["rank 0 (anna)", "rank 1 (anna)"]
    first = [event for event in complete(found) if event["pid"] == 0 and event["args"]["step"] == 1]
    phases = [(event["name"], event["ts"], event["dur"]) for event in first if event["tid"] == 1]
    assert phases[:3] == [("step 1", 0, 75000), ("data", 0, 4000), ("forward", 4000, 20000)]
    buckets = [event for event in first if event["tid"] == 2]
    assert [(event["name"], event["dur"], event["args"]["bytes"]) for event in buckets] == [
        ("bucket 0", 40000, 40000),
        ("bucket 1", 3000, 120000),
    ]


def test_buckets_that_overlap_in_part_lie_side_by_side() -> None:
    buckets: list[list[Any]] = [[0, 100.0, 100.3], [1, 100.1, 100.4], [2, 100.2, 100.5]]
    buckets += [[3, 100.35, 100.6], [4, 100.5, None]]
    found = trace(anatomy({0: [begin(0, 1), step(buckets=buckets)]}))
    assert_valid(found)
    lanes = [(event["name"], event["tid"]) for event in complete(found)]
    assert lanes == [("bucket 0", 2), ("bucket 1", 4), ("bucket 2", 6), ("bucket 3", 2)]
    assert named(found, "thread_name") == ["buckets", "buckets 2", "buckets 3"]


def two_hosts(apart: float) -> Made:
    made = lines(2, 5, planted(1, "backward", 0.05), spans=True)
    made[1] = [shifted(line, apart) for line in made[1]]
    return made


def shifted(line: dict[str, Any], by: float) -> dict[str, Any]:
    if line["kind"] == "begin":
        return {**line, "host": "bob", "at": line["at"] + by}
    moved = {
        kind: [[name, began + by, ended + by] for name, began, ended in line[kind]]
        for kind in ("spans", "buckets")
    }
    return line | moved


@pytest.mark.parametrize("apart", [-1e6, 0.0, 12345.678])
def test_hosts_are_aligned_by_the_moment_a_steps_sums_were_there(apart: float) -> None:
    starts = {0: [begin(0, 2, at=100.0)], 1: [begin(1, 2, host="bob", at=100.0 + apart)]}
    assert offsets(anatomy(starts))["bob"] == pytest.approx(-apart)  # no step is known
    made = anatomy(two_hosts(apart))
    assert offsets(made)["bob"] == pytest.approx(-apart, abs=1e-6)
    found = trace(made)
    assert_valid(found)
    last = {
        (event["pid"], event["args"]["step"]): event["ts"] + event["dur"]
        for event in complete(found)
        if event["name"] == "bucket 1"
    }
    assert all(abs(last[0, number] - last[1, number]) <= 2 for number in range(1, 6))


def test_generations_follow_each_other_on_one_lane() -> None:
    made = lines(2, 3, spans=True)
    later = lines(1, 2, spans=True, first=3)[0]
    made[0] += [{**shifted(line, 10.0), "host": "anna"} for line in later]
    found = trace(anatomy(made))
    assert_valid(found)
    steps = [event for event in complete(found) if event["cat"] == "step" and event["pid"] == 0]
    numbers = [(event["args"]["step"], event["args"]["generation"]) for event in steps]
    assert numbers == [(1, 0), (2, 0), (3, 0), (3, 1), (4, 1)]


@given(
    st.lists(st.tuples(st.floats(0, 10), st.floats(0, 5)), max_size=40),
    st.lists(st.tuples(st.floats(0, 10), st.floats(0, 5)), max_size=40),
)
def test_any_overlap_nests(
    spans: list[tuple[float, float]], buckets: list[tuple[float, float]]
) -> None:
    line = step(
        spans=[["forward", began, began + lasts] for began, lasts in spans],
        buckets=[[0, left, left + lasts] for left, lasts in buckets],
    )
    found = trace(anatomy({0: [begin(0, 1), line]}))
    assert_valid(found)
    assert len(complete(found)) == len(spans) + len(buckets) + bool(spans)


def test_it_is_written_whole_and_again(tmp_path: Path) -> None:
    for spans in (True, False):
        file = write(tmp_path, anatomy(lines(2, 3, noisy(0, 0.5), spans=spans)))
        written = json.loads(file.read_text())
        assert_valid(written)
        assert bool(complete(written)) is spans
    assert [each.name for each in tmp_path.iterdir()] == ["timeline.json"]
