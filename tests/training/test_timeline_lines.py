"""A line of a rank's file is one of the kinds, or none: nothing that it may hold raises."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from lockstep.training.timeline import Begin, End, MemoryLine, Pause, StepsLine, parse
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
    phases = "data forward backward exposed optimizer checks other"
    assert set(line.phases) == set(phases.split())
    assert line.spans[0][0] == "data"
    assert line.buckets[0][0] == 0


def test_what_is_not_known_is_none() -> None:
    """On a device, what was hidden; of a sum that never came, its end."""
    line = parse(changed(STEPS, hidden=None, buckets=[[0, 1.0, None]]))
    assert isinstance(line, StepsLine)
    assert (line.hidden, line.buckets) == (None, ((0, 1.0, None),))


def test_the_other_kinds() -> None:
    pause = '{"kind":"pause","what":"evaluate","step":3,"seconds":1.5}'
    assert parse(pause) == Pause(what="evaluate", step=3, seconds=1.5)
    memory = '{"kind":"memory","parameters":1,"gradients":2,"optimizer":3,"peak":null}'
    assert parse(memory) == MemoryLine(parameters=1, gradients=2, optimizer=3, peak=None)
    assert parse('{"kind":"end","step":4}') == End(step=4)


def test_what_is_none() -> None:
    for text in (
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
    ):
        assert parse(text) is None, text[:100]


@given(st.sampled_from(["begin", "steps", "pause", "memory", "end"]), st.data())
def test_nothing_that_a_line_may_hold_raises(kind: str, data: st.DataObject) -> None:
    whole = {"begin": begin(0, 1), "steps": STEPS}.get(
        kind, {"kind": kind, "what": "evaluate", "step": 1, "seconds": 1.0, "to": []}
    )
    name = data.draw(st.sampled_from(sorted(whole)))
    parse(json.dumps({**whole, name: data.draw(ANY)}))
