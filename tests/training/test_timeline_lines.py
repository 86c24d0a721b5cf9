"""A line of a rank's file is one of the kinds, or none: nothing that it may hold raises."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.training.timeline import (
    Begin,
    End,
    MemoryLine,
    Pause,
    StepsLine,
    parse,
)
from tests.training.synthetic import begin, lines

ANY = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.floats() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)
STEPS = lines(2, 1, spans=True)[0][1]


def changed(line: dict[str, Any], **changes: Any) -> str:
    return json.dumps({**line, **changes})


def test_begin_and_steps() -> None:
    found = parse(json.dumps(begin(3, 4, host="bob")))
    assert isinstance(found, Begin)
    assert (found.rank, found.workers, found.host, found.buckets, found.at) == (
        3,
        4,
        "bob",
        (40000, 120000),
        100.0,
    )
    line = parse(changed(STEPS, first=7, last=8, lost={"3": 0.5}))
    assert isinstance(line, StepsLine)
    assert set(line.phases) == {
        "data",
        "forward",
        "backward",
        "exposed",
        "optimizer",
        "checks",
        "other",
    }
    assert line.spans[0][0] == "data"
    assert line.buckets[0][0] == 0


def test_on_a_device_it_is_not_known_what_was_hidden() -> None:
    line = parse(changed(STEPS, hidden=None))
    assert isinstance(line, StepsLine)
    assert line.hidden is None


def test_the_other_kinds() -> None:
    assert parse('{"kind":"pause","what":"evaluate","step":3,"seconds":1.5}') == Pause(
        what="evaluate", step=3, seconds=1.5
    )
    memory = '{"kind":"memory","parameters":1,"gradients":2,"optimizer":3,"peak":null}'
    assert parse(memory) == MemoryLine(parameters=1, gradients=2, optimizer=3, peak=None)
    assert parse('{"kind":"end","step":4}') == End(step=4)


def test_a_sum_that_never_came_is_not_known() -> None:
    line = parse(changed(STEPS, buckets=[[0, 1.0, None]]))
    assert isinstance(line, StepsLine)
    assert line.buckets == ((0, 1.0, None),)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "[]",
        '{"kind":"steps"',
        '{"kind":"unheard of"}',
        changed(STEPS, seconds=-0.1),
        changed(STEPS, forward=float("nan")),
        changed(STEPS, data=True),
        changed(STEPS, first=0),
        changed(STEPS, first=3, last=2),
        changed(STEPS, lost={"x": 1.0}),
        changed(STEPS, lost=[1]),
        changed(STEPS, spans=[["data", 1.0]]),
        changed(begin(0, 1), workers="2"),
        changed(begin(0, 1), buckets=3),
        "[" * 100_000,
    ],
)
def test_what_is_none(text: str) -> None:
    assert parse(text) is None


@given(st.sampled_from(["begin", "steps", "pause", "memory", "end"]), st.data())
def test_nothing_that_a_line_may_hold_raises(kind: str, data: st.DataObject) -> None:
    whole = {"begin": begin(0, 1), "steps": STEPS}.get(
        kind, {"kind": kind, "what": "evaluate", "step": 1, "seconds": 1.0, "to": []}
    )
    name = data.draw(st.sampled_from(sorted(whole)))
    parse(json.dumps({**whole, name: data.draw(ANY)}))
