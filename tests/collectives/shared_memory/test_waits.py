"""Ranks that share cores sleep until they are woken, and none sleeps on what has already come."""

from __future__ import annotations

import ctypes
import os
import threading

import pytest
import torch

import lockstep
from lockstep.collectives.shared_memory import operations, waits
from lockstep.errors import WorkerFailed

pytestmark = pytest.mark.skipif(not operations.possible(), reason="as this room: x86-64 Linux")
_LONG = 1000.0  # s: a test that waits for it does not end


@pytest.mark.parametrize(
    ("cores", "crowd"),
    [
        ([[0, 1], [0, 1]], False),
        ([[0, 1]] * 3, True),
        ([[0], [1], [2]], False),  # bound, each to its own
        ([[0], [0]], True),
        ([[0, 1], [1, 2], [3]], False),
        ([[5]], False),
    ],
)
def test_who_shares_cores(cores: list[list[int]], crowd: bool) -> None:
    assert waits.crowded(cores) == crowd


def test_nobody_sleeps_on_what_has_changed_and_everybody_is_woken() -> None:
    word = ctypes.c_int64(7)
    address = ctypes.addressof(word)
    waits.futex_sleep(address, 6, _LONG)  # it is 7: nothing to sleep on
    waits.futex_sleep(address, 7, 0.01)
    woken = []

    def wait() -> None:
        while word.value == 7:
            waits.futex_sleep(address, 7, _LONG)
        woken.append(word.value)

    sleepers = [threading.Thread(target=wait) for _ in range(3)]
    for each in sleepers:
        each.start()
    word.value = 8
    waits.futex_wake(address)
    for each in sleepers:
        each.join()
    assert woken == [8, 8, 8]


def test_numbers_beyond_four_bytes_are_told_apart_by_their_lower_half() -> None:
    word = ctypes.c_int64(2**32 + 5)
    waits.futex_sleep(ctypes.addressof(word), 2**32 + 4, _LONG)
    waits.futex_sleep(ctypes.addressof(word), 2**32 + 5, 0.01)


def together(rank_that_leaves: int | None) -> tuple[float, list[float]]:
    """All on one core, where a sleeper that nobody wakes would sleep for ever."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    waits._LOOK = _LONG if rank_that_leaves is None else 0.1
    with lockstep.init(backend="gloo") as world:
        assert world.group.memory is not None
        assert world.group.memory._waits.crowded
        total = 0.0
        for step in range(50):
            if rank_that_leaves == world.rank and step == 20:
                os._exit(3)
            part = torch.full((100_000,), float(world.rank + step))  # several pieces
            world.group.all_reduce(part).wait()
            assert bool((part == part[0]).all())
            total += float(part[0])
        return total, world.group.all_gather(torch.tensor([float(world.rank)])).tolist()


def test_sums_of_ranks_on_one_core() -> None:
    expected = sum(sum(rank + step for rank in range(5)) for step in range(50))
    assert lockstep.launch(together, 5, (None,)) == [(expected, [0.0, 1.0, 2.0, 3.0, 4.0])] * 5


def test_a_rank_that_leaves_is_named_by_those_that_sleep() -> None:
    with pytest.raises(WorkerFailed, match=r"rank 1 .*exited with code 3"):
        lockstep.launch(together, 3, (1,))
