"""Exact mode over the backend: what is added where, while backward goes on, and who is named."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch
from torch import Tensor, nn

import lockstep
from lockstep.collectives import by_schedule
from lockstep.collectives.group import Group
from lockstep.collectives.work import Work
from lockstep.data.windows import Cut
from lockstep.errors import CollectiveTimeout, PeerFailed
from lockstep.gradients.bucket import Bucket
from lockstep.gradients.exact import ExactOverNetwork
from lockstep.gradients.layout import Entry, plan
from lockstep.testing import run_ranks
from tests.collectives.own_groups import group_of_its_own
from tests.step import walking  # noqa: F401 - it starts the thread of a team's rank
from tests.teams import on_team

DTYPES = {
    torch.float32: torch.int32,
    torch.float64: torch.int64,
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
}
COUNT = 5000


def patterns(slot: int, dtype: torch.dtype) -> Tensor:
    """Any bits, sums that cancel, denormals, zeros of both signs; nothing that is not finite."""
    generator = torch.Generator().manual_seed(slot)
    integer = DTYPES[dtype]
    info = torch.iinfo(integer)
    found = torch.randint(info.min, info.max, (COUNT,), dtype=integer, generator=generator)
    found = found.view(dtype).nan_to_num(0.5, 0.25, -0.25) / 64
    found[::3] = torch.randn(COUNT, generator=generator)[::3].to(dtype)
    numbers = torch.finfo(dtype)
    if slot % 2:  # denormals, made of bits: where they are flushed arithmetic makes none
        denormal = torch.randint(
            0, round(1 / numbers.eps), (COUNT,), dtype=integer, generator=generator
        )
        found[::5] = denormal[::5].view(dtype)
    else:  # to which they are added
        found[::5] = 8 * numbers.tiny * (-1) ** (slot // 2)
    return found


def along_the_tree(slots: range, dtype: torch.dtype) -> Tensor:
    """What the sum over these slots is, written out; they begin a block."""
    if len(slots) == 1:
        return patterns(slots[0], dtype)
    half = 1 << (len(slots) - 1).bit_length() - 1
    return along_the_tree(slots[:half], dtype) + along_the_tree(slots[half:], dtype)


def bucket_of(reduction: ExactOverNetwork, numel: int, dtype: torch.dtype) -> Bucket:
    """The only one."""
    parameter = nn.Parameter(torch.zeros(numel, dtype=dtype))
    layout = plan([Entry("only", numel, dtype, parameter.device)], [0], caps=[2**30])
    return Bucket(layout.buckets[0], [parameter], reduction.memory(layout)[0])


def summed(
    world: lockstep.World, cases: list[tuple[torch.dtype, int, int]], flush: bool
) -> list[Tensor]:
    """For each dtype, number of slots, and how many of them hold samples."""
    sums = []
    with flushing(flush):
        for dtype, slots, filled in cases:
            reduction = ExactOverNetwork(world.group)
            reduction.begin(Cut(step=0, epoch=0, start=0, stop=filled, micro_batch=1, slots=slots))
            bucket = bucket_of(reduction, COUNT, dtype)
            bucket.views[0].fill_(99)
            for level, block in enumerate(reduction.brought[world.rank]):
                slots_of = range(block.first, block.first + block.size)
                reduction.levels[level][0][:COUNT] = along_the_tree(slots_of, dtype)
            work = reduction.start(bucket)
            reduction.divisor = 4.0
            work.wait()
            sums.append(bucket.views[0].clone())
    return sums


@contextmanager
def flushing(flush: bool) -> Iterator[None]:
    torch.set_flush_denormal(flush)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize("flush", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_every_bit_is_that_of_the_tree(size: int, flush: bool) -> None:
    """Equal shares (two ranks all-reduce) and others; also with idle ranks."""
    slots_and_filled = {(8, 8), (8, 5), (6, 6), (size, size), (3, 3), (4, 1)}
    cases = [(dtype, *counts) for dtype in DTYPES for counts in sorted(slots_and_filled)]
    with flushing(flush):
        expected = [along_the_tree(range(filled), dtype) / 4 for dtype, _, filled in cases]
    for rank, sums in enumerate(on_team(summed, size, (cases, flush))):
        for case, ours, theirs in zip(cases, sums, expected, strict=True):
            integer = DTYPES[case[0]]
            assert torch.equal(ours.view(integer), theirs.view(integer)), (rank, case)


def sum_of_ranks(group: Group) -> tuple[Tensor, Work]:
    """A tensor whose sum over all ranks, of whom each has one slot, has begun."""
    reduction = ExactOverNetwork(group)
    reduction.begin(Cut(step=0, epoch=0, start=0, stop=group.size, micro_batch=1, slots=group.size))
    bucket = bucket_of(reduction, 100_000, torch.float32)
    bucket.views[0].fill_(group.rank + 1.0)
    return bucket.views[0], reduction.start(bucket)


def beside(world: lockstep.World) -> None:
    tensor, work = sum_of_ranks(world.group)
    deadline = time.monotonic() + 120
    while (tensor != sum(range(world.size + 1))).any():
        assert time.monotonic() < deadline, tensor
    work.wait()


@pytest.mark.parametrize("size", [2, 3])
def test_the_sum_is_handed_out_before_anybody_waits_for_it(size: int) -> None:
    on_team(beside, size)


def leaves(world: lockstep.World) -> None:
    """Rank 1 goes when it has told the others that it has come."""
    sum_of_ranks(world.group)[1].wait()
    if world.rank == 1:

        def leave(*_: object) -> None:
            raise KeyError

        by_schedule.execute = leave
    with pytest.raises(KeyError if world.rank == 1 else PeerFailed):
        sum_of_ranks(world.group)[1].wait()
    world.close(failed=True)


def test_a_rank_that_leaves_meanwhile_is_an_error_of_the_others() -> None:
    run_ranks(leaves, 3)


def late(world: lockstep.World) -> None:
    with group_of_its_own(world) as group:
        group.timeout = timedelta(seconds=0.3)
        if world.rank != 1:
            with pytest.raises(CollectiveTimeout) as caught:
                sum_of_ranks(group)[1].wait()
            assert tuple(caught.value.missing) == (1,)
        world.barrier()  # rank 1 is alive, but elsewhere, until the others have given up


@pytest.mark.parametrize("size", [2, 3])
def test_a_rank_that_is_late_is_named(size: int) -> None:
    on_team(late, size)
