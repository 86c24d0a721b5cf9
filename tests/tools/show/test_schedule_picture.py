"""Pictures of schedules: two word for word, checked by hand, and as many arrows in a drawing as
there are messages.
"""

from __future__ import annotations

import xml.etree.ElementTree as tree
from pathlib import Path

from lockstep.schedules.algorithms import algorithms_of, schedule
from lockstep.schedules.schedule import Kind, Schedule
from lockstep.tools.show import schedule_picture as picture
from tests.refused import refused

KINDS: tuple[Kind, ...] = (
    "all_reduce",
    "reduce",
    "reduce_scatter",
    "broadcast",
    "all_gather",
    "scatter",
    "gather",
    "all_to_all",
)

RING_OF_3 = """\
ring all-reduce, 3 ranks: 4 rounds, 12 messages in all
each rank sends 4/3 of the tensor
cell a is added as ((0+1)+2), the same bits on all ranks

start
    rank 0  a 0     b 0     c 0
    rank 1  a 1     b 1     c 1
    rank 2  a 2     b 2     c 2
round 1  0 -> 1 a   1 -> 2 b   2 -> 0 c    add
    rank 0  a 0     b 0     c 02
    rank 1  a 01    b 1     c 1
    rank 2  a 2     b 12    c 2
round 2  0 -> 1 c   1 -> 2 a   2 -> 0 b    add
    rank 0  a 0     b 012*  c 02
    rank 1  a 01    b 1     c 012*
    rank 2  a 012*  b 12    c 2
round 3  0 -> 1 b   1 -> 2 c   2 -> 0 a    replace
    rank 0  a 012*  b 012*  c 02
    rank 1  a 01    b 012*  c 012*
    rank 2  a 012*  b 12    c 012*
round 4  0 -> 1 a   1 -> 2 b   2 -> 0 c    replace
    rank 0  a 012*  b 012*  c 012*
    rank 1  a 012*  b 012*  c 012*
    rank 2  a 012*  b 012*  c 012*"""

BROADCAST_TO_2 = """\
tree broadcast, 2 ranks: 1 round, 1 message in all
each rank sends 0 to 1 times the tensor

start
    rank 0  a .
    rank 1  a 1
round 1  1 -> 0 a    replace
    rank 0  a 1
    rank 1  a 1"""


def every_schedule(world: int) -> list[Schedule]:
    return [
        schedule(kind, name, world, ranks_per_node=2)
        for kind in KINDS
        for name in algorithms_of(kind)
    ]


def test_text() -> None:
    for drawn, expected in (
        (schedule("all_reduce", "ring", 3), RING_OF_3),
        (schedule("broadcast", "tree", 2, root=1), BROADCAST_TO_2),
    ):
        lines = [line.rstrip() for line in picture.text(drawn).splitlines()]
        assert lines == expected.splitlines()


def test_everybody_ends_with_what_was_promised() -> None:
    """The picture's own arithmetic, against the meaning of an all-reduce."""
    for world in (1, 2, 3, 4, 6):
        for name in algorithms_of("all_reduce"):
            *_, last = picture.rounds(schedule("all_reduce", name, world, ranks_per_node=2))
            for held in last.contents:
                assert set(held.values()) == {frozenset(range(world))}, (name, world)


def test_beyond_16_ranks_contents_are_left_out_and_said_to_be() -> None:
    shown = picture.text(schedule("all_reduce", "ring", 17)).splitlines()
    assert shown[3] == "contents are written out for up to 16 ranks"
    assert not [line for line in shown if line.startswith("    rank")]
    assert len([line for line in shown if line.startswith("round")]) == 32
    assert "contents are written out" not in picture.text(schedule("all_reduce", "ring", 16))


def parsed(drawn: Schedule) -> tree.Element:
    return tree.fromstring(picture.drawing(drawn).svg())


def words(root: tree.Element) -> list[str]:
    return [element.text or "" for element in root if element.tag.endswith("text")]


def arrows(root: tree.Element) -> list[tree.Element]:
    return [each for each in root if "message" in (each.get("class") or "").split()]


def test_a_drawing_has_an_arrow_a_message() -> None:
    for world in (1, 2, 3, 4, 16):
        root = parsed(schedule("all_reduce", "ring", world))
        steps = 2 * (world - 1)
        assert len(arrows(root)) == steps * world
        assert words(root).count("add") == words(root).count("replace") == world - 1
    for world in (2, 3, 4):
        for drawn in every_schedule(world):
            assert len(arrows(parsed(drawn))) == sum(map(len, drawn.transfers())), drawn.name


def test_files_that_cannot_be_are_refused(tmp_path: Path) -> None:
    ring = picture.drawing(schedule("all_reduce", "ring", 4))
    with refused("wrong-ending", option="--out", file=str(tmp_path / "ring.pdf")):
        ring.save(tmp_path / "ring.pdf")
    nowhere = str(tmp_path / "nowhere" / "ring.svg")
    with refused("cannot-write", file=nowhere, reason="No such file or directory"):
        ring.save(tmp_path / "nowhere" / "ring.svg")
    with refused("drawing-too-large", what="17 ranks with 17 cells each", most=16):
        picture.drawing(schedule("all_reduce", "ring", 17))
    assert not list(tmp_path.iterdir())
