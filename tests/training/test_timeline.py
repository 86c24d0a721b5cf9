"""Files of killed, missing and restarted ranks are read as far as they go, and what is missing
is known. A line is one of the kinds, or none: nothing that it may hold raises.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from lockstep.training.timeline import Pause, StepsLine, Timeline, parse, read
from tests.training.synthetic import anatomy, begin, lines, write


def file(run: Path, rank: int) -> Path:
    return run / "anatomy" / f"rank-{rank}.jsonl"


def known(run: Path) -> Timeline:
    anatomy = read(run)
    assert anatomy is not None
    return anatomy


def test_all_ranks_of_one_start(tmp_path: Path) -> None:
    made = lines(3, 4)
    for each in made.values():
        each += [
            {"kind": "pause", "what": "evaluate", "step": 4, "seconds": 0.5},
            {"kind": "end", "step": 4},
        ]
    found = known(write(tmp_path, made))
    (generation,) = found.starts
    assert (generation.workers, generation.step, generation.last) == (3, 0, 4)
    assert generation.missing == ()
    assert list(generation.lanes) == [0, 1, 2]
    lane = generation.lanes[1]
    assert [line.first for line in lane.steps] == [1, 2, 3, 4]
    assert lane.pauses == (Pause(what="evaluate", step=4, seconds=0.5),)
    assert lane.ended
    assert not found.unread


def test_no_folder_and_no_start_are_no_anatomy(tmp_path: Path) -> None:
    assert read(tmp_path) is None
    write(tmp_path, {0: [{"kind": "end", "step": 0}]})
    assert read(tmp_path) is None


def test_a_killed_rank_leaves_half_a_line_and_who_starts_again_below_it_is_seen(
    tmp_path: Path,
) -> None:
    write(tmp_path, lines(2, 3))
    with file(tmp_path, 1).open("a") as stream:
        stream.write('{"kind":"steps","first":4,"la')
    found = known(tmp_path)
    lane = found.starts[0].lanes[1]
    assert [line.first for line in lane.steps] == [1, 2, 3]
    assert not lane.ended
    assert not found.unread
    with file(tmp_path, 1).open("a") as stream:
        stream.write("\n")
    write(tmp_path, lines(2, 3, first=3))
    found = known(tmp_path)
    starts = [(each.step, list(each.lanes), each.last) for each in found.starts]
    assert starts == [(0, [0, 1], 3), (2, [0, 1], 5)]
    assert found.unread == {1: 1}


def test_missing_ranks_are_told(tmp_path: Path) -> None:
    made = lines(4, 3)
    del made[0], made[2]
    found = known(write(tmp_path, made))
    assert found.starts[0].missing == (0, 2)
    assert found.starts[0].begin.rank == 1


def test_damage_in_the_middle_is_counted(tmp_path: Path) -> None:
    write(tmp_path, lines(1, 3))
    rows = file(tmp_path, 0).read_text().splitlines()
    rows[2] = rows[2][:20]
    file(tmp_path, 0).write_bytes("\n".join([*rows, "\x00garbage", ""]).encode() + b"\xff\xfe\n")
    found = known(tmp_path)
    assert [line.first for line in found.starts[0].lanes[0].steps] == [1, 3]
    assert found.unread == {0: 3}


def test_another_ranks_file_under_this_name_is_no_lane(tmp_path: Path) -> None:
    write(tmp_path, {0: [begin(0, 2)], 1: [begin(0, 2)], 2: []})
    (tmp_path / "anatomy" / "rank-x.jsonl").write_text(json.dumps(begin(0, 1)))
    found = known(tmp_path)
    assert list(found.starts[0].lanes) == [0]


def test_restarts_with_other_worker_counts(tmp_path: Path) -> None:
    """4 ranks die twice before the next checkpoint, 3 go on, then 4 again."""
    for workers, steps, first in ((4, 5, 1), (4, 3, 1), (3, 6, 4), (4, 2, 10)):
        write(tmp_path, lines(workers, steps, first=first))
    found = known(tmp_path)
    starts = [(each.workers, each.step, each.last) for each in found.starts]
    assert starts == [(4, 0, 5), (4, 0, 3), (3, 3, 9), (4, 9, 11)]
    assert [len(each.lanes) for each in found.starts] == [4, 4, 3, 4]
    assert found.longest is found.starts[2]


def test_order_is_kept_where_ranks_missed_a_start(tmp_path: Path) -> None:
    """Rank 0 was killed before it could write in the second start. In the first run, rank 1 took
    part in all starts, rank 2 in the first two; in the second run, no rank took part in all.
    """
    first, second, third = lines(3, 2), lines(3, 2, first=2), lines(2, 2, first=3)
    written = {0: first[0] + third[0], 1: first[1] + second[1] + third[1]}
    found = known(write(tmp_path / "one", {**written, 2: first[2] + second[2]}))
    assert [(each.workers, each.step, list(each.lanes)) for each in found.starts] == [
        (3, 0, [0, 1, 2]),
        (3, 1, [1, 2]),
        (2, 2, [0, 1]),
    ]
    first, second, third = lines(2, 2), lines(2, 2, first=2), lines(1, 2, first=3)
    written = {0: first[0] + third[0], 1: first[1] + second[1]}
    found = known(write(tmp_path / "other", written))
    assert [(each.workers, each.step) for each in found.starts] == [(2, 0), (2, 1), (1, 2)]


def test_only_steps_that_all_ranks_tell_of_are_common() -> None:
    made = lines(2, 5)
    del made[1][-2:]
    for lane in anatomy(made).starts[0].common().lanes.values():
        assert [line.first for line in lane.steps] == [1, 2, 3]


def test_hosts_of_one_name_are_told_apart() -> None:
    files = lines(3, 2)
    for rank, each in files.items():
        each[0]["node"] = min(rank, 1)
    (generation,) = anatomy(files).starts
    hosts = [lane.begin.host for lane in generation.lanes.values()]
    assert hosts == ["anna (node 0)", "anna (node 1)", "anna (node 1)"]


# -- lines ---------------------------------------------------------------------------------------

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


def test_what_is_not_known_is_none() -> None:
    """On a device, what was hidden; of a sum that never came, its end."""
    line = parse(changed(STEPS, hidden=None, buckets=[[0, 1.0, None]]))
    assert isinstance(line, StepsLine)
    assert (line.hidden, line.buckets) == (None, ((0, 1.0, None),))


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
