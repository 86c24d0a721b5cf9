"""The cut as a picture, its properties over all small worlds, and the Window that keeps what it
has fetched.
"""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.data.windows import Cut, Plan, Window
from tests.refused import refused


def picture(plan: Plan, size: int) -> list[str]:
    """A line a step of the first epoch: every rank's positions, slot by slot."""
    lines = []
    for cut in map(plan.cut, range(plan.steps_per_epoch)):
        ranks = []
        for rank in range(size):
            slots = ["".join(map(str, cut.positions(slot))) for slot in cut.share(rank, size)]
            ranks.append(" ".join(slot or "-" for slot in slots))
        lines.append(" | ".join(ranks))
    return lines


@pytest.mark.parametrize(
    ("sizes", "ranks", "lines"),
    [
        ((10, 8, 2), 1, ["01 23 45 67", "89 - - -"]),
        ((10, 8, 2), 2, ["01 23 | 45 67", "89 - | - -"]),
        ((10, 8, 2), 3, ["01 23 | 45 | 67", "89 - | - | -"]),
        ((10, 8, 2), 4, ["01 | 23 | 45 | 67", "89 | - | - | -"]),
        ((10, 8, 2), 6, ["01 | 23 | 45 | 67 |  | ", "89 | - | - | - |  | "]),
        ((10, 5, 2), 2, ["01 23 | 4", "56 78 | 9"]),  # 2 does not divide 5
        ((9, 6, 2), 3, ["01 | 23 | 45", "67 | 8 | -"]),  # ends inside a micro-batch
        ((3, 8, 2), 2, ["01 2 | - -"]),  # a step is larger than the data
        ((10, 8, 2, "drop_last"), 2, ["01 23 | 45 67"]),
    ],
)
def test_pictures(sizes: tuple[Any, ...], ranks: int, lines: list[str]) -> None:
    samples, global_batch, micro_batch, *drop = sizes
    plan = Plan(
        samples=samples, global_batch=global_batch, micro_batch=micro_batch, drop_last=bool(drop)
    )
    assert picture(plan, ranks) == lines


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    samples = draw(st.integers(1, 60))
    global_batch = draw(st.integers(1, 70))
    drop_last = samples >= global_batch and draw(st.booleans())
    return Plan(
        samples=samples,
        global_batch=global_batch,
        micro_batch=draw(st.integers(1, global_batch)),
        drop_last=drop_last,
    )


@given(plans(), st.integers(0, 3))
def test_an_epoch_holds_every_position_once(plan: Plan, epoch: int) -> None:
    first = epoch * plan.steps_per_epoch
    cuts = [plan.cut(step) for step in range(first, first + plan.steps_per_epoch)]
    assert cuts
    positions = [
        position for cut in cuts for slot in range(cut.slots) for position in cut.positions(slot)
    ]
    assert positions == list(range(plan.samples - plan.dropped))
    assert plan.dropped == (plan.samples % plan.global_batch if plan.drop_last else 0)
    assert [(cut.step, cut.epoch, cut.start) for cut in cuts] == [
        (first + number, epoch, number * plan.global_batch) for number in range(len(cuts))
    ]
    for cut in cuts:
        assert cut.slots == plan.slots
        assert all(len(cut.positions(slot)) <= plan.micro_batch for slot in range(cut.slots))
    assert all(cut.stop - cut.start == plan.global_batch for cut in cuts[:-1])


@given(plans(), st.integers(1, 80), st.integers(0, 200))
def test_ranks_share_the_slots_and_change_nothing_else(plan: Plan, size: int, step: int) -> None:
    cut = plan.cut(step)
    shares = [cut.share(rank, size) for rank in range(size)]
    assert [slot for share in shares for slot in share] == list(range(cut.slots))
    lengths = [len(share) for share in shares]
    assert max(lengths) - min(lengths) <= 1
    assert lengths == sorted(lengths, reverse=True)
    assert shares == [plan.cut(0).share(rank, size) for rank in range(size)]
    assert (
        sum(len(cut.positions(slot)) for rank in range(size) for slot in cut.filled(rank, size))
        == cut.stop - cut.start
    )
    for rank, share in enumerate(shares):
        assert list(cut.filled(rank, size)) == [slot for slot in share if len(cut.positions(slot))]


@pytest.mark.parametrize(
    ("sizes", "ranks", "line"),
    [
        ((256, 32), 3, "global batch 256 = 8 micro-batches x 32; 3 ranks: 3, 3, 2"),
        ((256, 32), 12, "global batch 256 = 8 micro-batches x 32; 12 ranks: 8 x 1, 4 idle"),
        ((256, 16), 12, "global batch 256 = 16 micro-batches x 16; 12 ranks: 4 x 2, 8 x 1"),
        ((32, 32), 1, "global batch 32 = 1 micro-batch x 32; 1 rank x 1"),
        ((100, 32), 2, "global batch 100 = 4 micro-batches x 32, the last 4; 2 ranks x 2"),
    ],
)
def test_one_line_says_how_a_step_is_shared(sizes: tuple[int, int], ranks: int, line: str) -> None:
    plan = Plan(samples=1000, global_batch=sizes[0], micro_batch=sizes[1])
    assert plan.describe(ranks) == line
    dropping = Plan(samples=9, global_batch=4, micro_batch=2, drop_last=True)
    assert dropping.describe(2).endswith("; 2 ranks x 1; 1 sample of an epoch dropped")


def test_sizes_that_cannot_be_cut_are_refused() -> None:
    sizes: dict[str, Any] = {"samples": 10, "global_batch": 8, "micro_batch": 2}
    for name, value in (("global_batch", 0), ("global_batch", True), ("micro_batch", 2.0)):
        with refused("wrong-value", name=name, value=value):
            Plan(**(sizes | {name: value}))
    with refused("empty-dataset", name="the dataset"):
        Plan(**(sizes | {"samples": 0}))
    with refused("micro-batch-too-large", micro_batch=9, global_batch=8):
        Plan(**(sizes | {"micro_batch": 9}))
    with refused("only-step-dropped", have="7 samples", need="global_batch=8"):
        Plan(**(sizes | {"samples": 7}), drop_last=True)


SHORT = Cut(step=4, epoch=1, start=8, stop=13, micro_batch=2, slots=4)  # slots 0, 1 and half of 2


def test_a_window_knows_its_place() -> None:
    window = Window(SHORT, rank=0, size=2, fetch=int)
    assert (window.step, window.epoch, list(window.slots), window.samples) == (4, 1, [0, 1], 4)
    assert window.positions == [range(8, 10), range(10, 12)]
    last = Window(SHORT, rank=1, size=2, fetch=int)
    assert (list(last.slots), last.positions, last.samples) == ([2], [range(12, 13)], 1)
    assert len(last) == 1


def test_a_window_fetches_late_and_once_and_draining_fetches_what_nobody_walked() -> None:
    numbers = count()
    window = Window(SHORT, 0, 1, numbers.__next__)
    assert len(window) == 3
    walk = iter(window)
    assert next(walk) == 0
    window.drain()
    window.drain()
    assert list(window) == list(window) == [0, 1, 2]
    assert next(walk) == 1
    assert next(numbers) == 3
    late = Window(SHORT, 0, 1, numbers.__next__)
    assert next(numbers) == 4
    assert next(iter(late)) == 5
    assert next(numbers) == 6


def test_a_window_is_a_sequence() -> None:
    window = Window(SHORT, 0, 1, count().__next__)
    assert (window[-1], window[1:], window[::-1]) == (2, [1, 2], [2, 1, 0])
    assert list(reversed(window)) == [2, 1, 0]
    for index in (3, -4):
        with pytest.raises(IndexError):
            window[index]


def test_a_rank_without_a_share_has_an_empty_window() -> None:
    for rank, size in ((3, 4), (5, 6)):  # an empty slot, no slot
        window = Window(SHORT, rank, size, {}.popitem)  # raises when called
        window.drain()
        assert not window
        assert (list(window), window.samples, window.positions, window.step) == ([], 0, [], 4)
