"""What is timed, each piece once, and in which order.

What is trained at each number of workers, and the sentences for what cannot be compared.
"""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.tools.bench.scaling.works import (
    Mode,
    TimedWork,
    Works,
    busiest,
    ceiling,
    check_samples,
    check_workers,
    global_batches,
    in_words,
    modes_of,
    order_of_turns,
    uneven,
)
from tests.refused import refused


def works(
    *modes: Mode, counts: tuple[int, ...] = (1, 2, 4), batch: int = 64, micro: int = 8
) -> Works:
    batches = {mode: global_batches(mode, batch, micro, counts) for mode in modes}
    return Works(
        batches=batches, micro_batch=micro, threads={count: max(1, 4 // count) for count in counts}
    )


def test_every_row_and_every_rows_fullest_rank_alone() -> None:
    one, two, four, *alone = works("strong").all()
    assert (one, two.workers, four) == (
        TimedWork(workers=1, global_batch=64, threads=4),
        2,
        TimedWork(workers=4, global_batch=64, threads=1),
    )
    # The base alone is the base itself. The others' share, with the threads that a rank of theirs
    # has.
    assert alone == [
        TimedWork(workers=1, global_batch=32, threads=2),
        TimedWork(workers=1, global_batch=16, threads=1),
    ]


def test_the_fullest_of_three_has_three_of_eight_micro_batches() -> None:
    assert works("strong", counts=(3, 8)).alone("strong", 3).global_batch == 24


def test_a_small_last_micro_batch_is_the_last_ranks() -> None:
    ragged = works("strong", counts=(1, 2), batch=22, micro=5)
    assert [ragged.alone("strong", workers).global_batch for workers in (1, 2)] == [22, 15]


def test_in_weak_scaling_a_rank_alone_is_the_base() -> None:
    found = Works(
        batches={"weak": global_batches("weak", 64, 8, (1, 2, 4))},
        micro_batch=8,
        threads=dict.fromkeys((1, 2, 4), 1),
    ).all()
    assert [(work.workers, work.global_batch) for work in found] == [(1, 64), (2, 128), (4, 256)]


def test_both_modes_share_the_base() -> None:
    found = works("strong", "weak").all()
    # rows; then shares of 32 and 16, and 64 with fewer threads
    assert [work.workers for work in found] == [1, 2, 4, 2, 4, 1, 1, 1, 1]


def test_without_one_worker_there_is_still_one_rank_alone() -> None:
    found = works("strong", counts=(2, 4)).all()
    assert [(work.workers, work.global_batch) for work in found] == [
        (2, 64),
        (4, 64),
        (1, 32),
        (1, 16),
    ]


def test_turns_go_to_and_fro() -> None:
    """One turn each to warm up, then two rounds."""
    assert order_of_turns(3, 2) == [0, 1, 2, 2, 1, 0, 0, 1, 2]


def test_strong_keeps_the_global_batch_and_weak_that_of_a_rank() -> None:
    assert global_batches("strong", 64, 8, [1, 2, 3]) == {1: 64, 2: 64, 3: 64}
    assert global_batches("weak", 64, 8, [1, 2, 3]) == {1: 64, 2: 128, 3: 192}


def test_in_weak_scaling_the_first_number_trains_the_task_as_it_is() -> None:
    assert global_batches("weak", 64, 8, [4, 1, 6]) == {4: 64, 1: 16, 6: 96}


@pytest.mark.parametrize(
    ("batch", "micro", "base", "each"),
    [(22, 5, 1, 22), (64, 8, 3, pytest.approx(21.3333, abs=1e-4)), (64, 64, 2, 32)],
)
def test_weak_scaling_of_parts_of_micro_batches_is_refused(
    batch: int, micro: int, base: int, each: float
) -> None:
    said = {"global_batch": batch, "micro_batch": micro, "workers": base, "each": each}
    with refused("weak-scaling-uneven", **said):
        global_batches("weak", batch, micro, [base, 4])


@pytest.mark.parametrize(
    ("workers", "code", "values"),
    [
        ([], "wrong-type", {"name": "workers", "value": []}),
        ([1, 0], "not-a-whole-number", {"value": 0}),
        ([-2], "not-a-whole-number", {"value": -2}),
        ([True, 2], "not-a-whole-number", {"value": True}),
        ([1.0], "not-a-whole-number", {"value": 1.0}),
        ([2, 1, 2], "given-twice", {"where": "workers=2,1,2", "name": 2}),
        ("1,2", "wrong-type", {"name": "workers", "value": "1,2"}),
        (4, "wrong-type", {"name": "workers", "value": 4}),
    ],
)
def test_numbers_of_workers_that_make_no_sense_are_refused(
    workers: Any, code: str, values: dict[str, Any]
) -> None:
    with refused(code, **values):
        check_workers(workers)


def test_any_number_may_be_the_base() -> None:
    assert check_workers([4, 1, 2]) == (4, 1, 2)


def test_modes() -> None:
    assert (modes_of("strong"), modes_of("weak"), modes_of("both")) == (
        ("strong",),
        ("weak",),
        ("strong", "weak"),
    )
    with refused("unknown-choice", name="mode", value="hard"):
        modes_of("hard")


def test_a_data_set_without_one_full_step_is_refused() -> None:
    check_samples(128, {1: 64, 2: 128}, "weak")
    said = {"workers": 2, "mode": "weak", "global_batch": 128, "samples": 127}
    with refused("step-larger-than-data", **said):
        check_samples(127, {1: 64, 2: 128}, "weak")


def test_the_fullest_rank_decides_how_far_a_cut_can_scale() -> None:
    strong = global_batches("strong", 64, 8, [1, 2, 3, 16])
    assert [busiest(64, 8, workers) for workers in strong] == [8, 4, 3, 1]
    assert [ceiling(strong, 8, workers) for workers in strong] == [1, 1, pytest.approx(8 / 9), 0.5]
    assert ceiling(global_batches("weak", 64, 8, [1, 3]), 8, 3) == 1
    # the base itself is uneven: more workers can gain more than their share
    assert ceiling({3: 64, 8: 64}, 8, 8) == pytest.approx(9 / 8)


def test_what_does_not_divide_is_said() -> None:
    assert uneven("strong", {1: 64, 2: 64, 3: 64, 16: 64}, 8) == [
        "strong, 3 workers: 8 micro-batches on 3 ranks: 3, 3, 2, so efficiency cannot pass 89 %",
        (
            "strong, 16 workers: 8 micro-batches on 16 ranks: 8 x 1, 8 idle, so efficiency cannot"
            " pass 50 %"
        ),
    ]
    assert uneven("weak", {1: 64, 3: 192}, 8) == []


def test_what_stays_is_said() -> None:
    assert "global batch stays 64 (8 micro-batches of 8)" in in_words("strong", {1: 64, 2: 64}, 8)
    assert "batch of a rank stays 32 (4 micro-batches of 8)" in in_words("weak", {2: 64, 4: 128}, 8)
