"""The cut as a picture, its properties over all small worlds, and the Window that keeps what it
has fetched.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

import numpy as np
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
            ranks.append(
                " ".join(
                    "".join(map(str, cut.positions(slot))) or "-" for slot in cut.share(rank, size)
                )
            )
        lines.append(" | ".join(ranks))
    return lines


def test_ten_samples_in_steps_of_eight() -> None:
    plan = Plan(samples=10, global_batch=8, micro_batch=2)
    assert picture(plan, 1) == ["01 23 45 67", "89 - - -"]
    assert picture(plan, 2) == ["01 23 | 45 67", "89 - | - -"]
    assert picture(plan, 3) == ["01 23 | 45 | 67", "89 - | - | -"]
    assert picture(plan, 4) == ["01 | 23 | 45 | 67", "89 | - | - | -"]
    assert picture(plan, 6) == ["01 | 23 | 45 | 67 |  | ", "89 | - | - | - |  | "]


def test_a_micro_batch_that_does_not_divide_leaves_a_smaller_last_one() -> None:
    assert picture(Plan(samples=10, global_batch=5, micro_batch=2), 2) == ["01 23 | 4", "56 78 | 9"]


def test_a_short_step_ends_inside_a_micro_batch() -> None:
    assert picture(Plan(samples=9, global_batch=6, micro_batch=2), 3) == [
        "01 | 23 | 45",
        "67 | 8 | -",
    ]


def test_one_step_is_larger_than_the_data() -> None:
    plan = Plan(samples=3, global_batch=8, micro_batch=2)
    assert (plan.steps_per_epoch, plan.slots) == (1, 4)
    assert picture(plan, 2) == ["01 2 | - -"]


def test_drop_last_drops_the_short_step_on_all_ranks() -> None:
    plan = Plan(samples=10, global_batch=8, micro_batch=2, drop_last=True)
    assert picture(plan, 2) == ["01 23 | 45 67"]
    assert plan.dropped == 2
    assert Plan(samples=8, global_batch=8, micro_batch=2, drop_last=True).dropped == 0


def test_no_step_spans_two_epochs() -> None:
    plan = Plan(samples=10, global_batch=4, micro_batch=2)
    spans = [(cut.step, cut.epoch, cut.start, cut.stop) for cut in map(plan.cut, range(6))]
    assert spans == [
        (0, 0, 0, 4),
        (1, 0, 4, 8),
        (2, 0, 8, 10),
        (3, 1, 0, 4),
        (4, 1, 4, 8),
        (5, 1, 8, 10),
    ]


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
    for cut in cuts:
        assert cut.epoch == epoch
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
        ((256, 32), 4, "global batch 256 = 8 micro-batches x 32; 4 ranks x 2"),
        ((256, 32), 3, "global batch 256 = 8 micro-batches x 32; 3 ranks: 3, 3, 2"),
        ((256, 32), 12, "global batch 256 = 8 micro-batches x 32; 12 ranks: 8 x 1, 4 idle"),
        ((256, 16), 12, "global batch 256 = 16 micro-batches x 16; 12 ranks: 4 x 2, 8 x 1"),
        ((256, 32), 1, "global batch 256 = 8 micro-batches x 32; 1 rank x 8"),
        ((32, 32), 1, "global batch 32 = 1 micro-batch x 32; 1 rank x 1"),
        ((100, 32), 2, "global batch 100 = 4 micro-batches x 32, the last 4; 2 ranks x 2"),
    ],
)
def test_one_line_says_how_a_step_is_shared(sizes: tuple[int, int], ranks: int, line: str) -> None:
    assert Plan(samples=1000, global_batch=sizes[0], micro_batch=sizes[1]).describe(ranks) == line


def test_the_line_says_what_is_dropped() -> None:
    assert (
        Plan(samples=9, global_batch=4, micro_batch=2, drop_last=True)
        .describe(2)
        .endswith("; 2 ranks x 1; 1 sample of an epoch dropped")
    )
    assert (
        Plan(samples=8, global_batch=4, micro_batch=2, drop_last=True)
        .describe(2)
        .endswith("; 2 ranks x 1")
    )


@pytest.mark.parametrize(
    ("changed", "code", "values"),
    [
        ({"samples": 0}, "empty-dataset", {"name": "the dataset"}),
        (
            {"global_batch": 0},
            "wrong-value",
            {"name": "global_batch", "value": 0, "expected": "a whole number of at least 1"},
        ),
        (
            {"micro_batch": -2},
            "wrong-value",
            {"name": "micro_batch", "value": -2, "expected": "a whole number of at least 1"},
        ),
        ({"micro_batch": 9}, "micro-batch-too-large", {"micro_batch": 9, "global_batch": 8}),
        (
            {"micro_batch": 2.0},
            "wrong-value",
            {"name": "micro_batch", "value": 2.0, "expected": "a whole number of at least 1"},
        ),
        (
            {"global_batch": True},
            "wrong-value",
            {"name": "global_batch", "value": True, "expected": "a whole number of at least 1"},
        ),
        (
            {"global_batch": "8"},
            "wrong-value",
            {"name": "global_batch", "value": "8", "expected": "a whole number of at least 1"},
        ),
        (
            {"drop_last": True, "samples": 7},
            "only-step-dropped",
            {"have": "7 samples", "need": "global_batch=8"},
        ),
    ],
)
def test_sizes_that_cannot_be_cut_are_refused(
    changed: dict[str, int], code: str, values: dict[str, Any]
) -> None:
    sizes = {"samples": 10, "global_batch": 8, "micro_batch": 2}
    with refused(code, **values):
        Plan(**(sizes | changed))


def test_numpy_integers_are_whole_numbers() -> None:
    assert Plan(samples=10, global_batch=np.int64(8), micro_batch=2).slots == 4  # type: ignore[arg-type]


# -- Window --------------------------------------------------------------------------------------


def counter() -> Callable[[], int]:
    numbers = count()
    return lambda: next(numbers)


SHORT = Cut(step=4, epoch=1, start=8, stop=13, micro_batch=2, slots=4)  # slots 0, 1 and half of 2


def test_a_window_knows_its_place() -> None:
    window = Window(SHORT, rank=0, size=2, fetch=counter())
    assert (window.step, window.epoch, list(window.slots), window.samples) == (4, 1, [0, 1], 4)
    assert window.positions == [range(8, 10), range(10, 12)]
    last = Window(SHORT, rank=1, size=2, fetch=counter())
    assert (list(last.slots), last.positions, last.samples, len(last)) == (
        [2],
        [range(12, 13)],
        1,
        1,
    )


def test_a_window_fetches_late_and_once() -> None:
    fetched = []
    window = Window(SHORT, 0, 1, lambda: fetched.append(len(fetched)) or fetched[-1])
    assert (len(window), fetched) == (3, [])
    walk = iter(window)
    assert (next(walk), fetched) == (0, [0])
    assert list(window) == list(window) == [0, 1, 2]
    assert next(walk) == 1
    assert fetched == [0, 1, 2]


def test_a_window_is_a_sequence() -> None:
    window = Window(SHORT, 0, 1, counter())
    assert window[-1] == 2
    assert window[1:] == [1, 2]
    assert window[::-1] == [2, 1, 0]
    assert list(reversed(window)) == [2, 1, 0]
    for place in (3, -4):
        with pytest.raises(IndexError):
            window[place]


def test_a_rank_without_a_share_has_an_empty_window() -> None:
    def never() -> None:
        raise AssertionError("nothing is there to fetch")

    for rank, size in ((3, 4), (5, 6)):  # an empty slot, no slot
        window = Window(SHORT, rank, size, never)
        window.drain()
        assert (list(window), len(window), window.samples, window.positions, window.step) == (
            [],
            0,
            0,
            [],
            4,
        )
        assert not window


def test_draining_fetches_what_nobody_walked() -> None:
    numbers = count()
    window = Window(SHORT, 0, 1, lambda: next(numbers))
    assert next(iter(window)) == 0
    window.drain()
    window.drain()
    assert next(numbers) == 3
    assert list(window) == [0, 1, 2]
