"""What is timed, each piece once, and in which order."""

from __future__ import annotations

from lockstep.tools.bench.scaling.works import (
    Mode,
    TimedWork,
    Works,
    global_batches,
    order_of_turns,
)


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
