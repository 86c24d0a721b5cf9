"""Tensors that lie in shared memory: summed where they are, by slices, in tree order."""

from __future__ import annotations

import os
import re
import signal
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import lockstep
from lockstep.collectives.addition_order import BLOCK, slice_of
from lockstep.errors import CollectiveMismatch, PeerFailed
from tests.collectives.numbers import folded
from tests.collectives.own_groups import group_of_its_own
from tests.refused import refused
from tests.teams import on_team
from tests.world.siblings import run_siblings

SIZES = [1, BLOCK, 3 * BLOCK + 5, 300_000, 0]
TYPES = [torch.float32, torch.float64, torch.float32, torch.bfloat16, torch.float32]


def noise(rank: int, number: int) -> Tensor:
    return torch.randn(
        SIZES[number],
        generator=torch.Generator().manual_seed(10 * rank + number),
        dtype=torch.float32,
    ).to(TYPES[number])


@dataclass
class Divisor:
    divisor: float | None


def summed(world: lockstep.World, rounds: int, scattered: bool, divisor: float) -> list[Tensor]:
    memory = world.group.memory
    assert memory is not None
    everybodys = memory.allocate(SIZES, TYPES)
    for _ in range(rounds):
        for number, tensors in enumerate(everybodys):
            tensors[world.rank].copy_(noise(world.rank, number))
        works = [
            memory.sum_in_place(tensors, divides=Divisor(divisor), scattered=scattered)
            for tensors in everybodys
        ]
        small = memory.all_reduce(torch.ones(1))
        for work in reversed(works):
            work.wait()
        small.wait()
    return [tensors[world.rank].clone() for tensors in everybodys]


@pytest.mark.parametrize("workers", [2, 3, pytest.param(5, marks=pytest.mark.rest), 8])
def test_the_sum_is_along_the_tree_and_divided_once(workers: int) -> None:
    found = on_team(summed, workers, args=(3, False, 3.0))
    for number, dtype in enumerate(TYPES):
        wide = torch.float32 if dtype == torch.bfloat16 else dtype
        expected = (
            folded([noise(rank, number).to(wide) for rank in range(workers)]).to(dtype)
        ).div_(3.0)
        for tensors in found:
            assert torch.equal(tensors[number], expected)


def test_scattered_a_rank_has_its_slice_and_keeps_its_own_elsewhere() -> None:
    for rank, tensors in enumerate(on_team(summed, 3, args=(1, True, 1.0))):
        mine = slice_of(SIZES[3], rank, 3)
        expected = noise(rank, 3)
        expected[mine.start : mine.stop] = folded([noise(other, 3).float() for other in range(3)])[
            mine.start : mine.stop
        ].bfloat16()
        assert torch.equal(tensors[3], expected)


def rounds(world: lockstep.World) -> list[float]:
    memory = world.group.memory
    assert memory is not None
    (tensors,) = memory.allocate([10 * BLOCK], [torch.float32])
    mine = slice_of(10 * BLOCK, world.rank, world.size)
    for number in range(50):
        tensors[world.rank][mine.start : mine.stop] = 100.0 * number + world.rank
        memory.gather_slices([tensors])
        assert tensors[world.rank].unique().tolist() == [
            100.0 * number + rank for rank in range(world.size)
        ]
    return tensors[world.rank].unique().tolist()


def test_slices_go_round_and_nobody_overtakes() -> None:
    assert on_team(rounds, 3) == [[4900.0, 4901.0, 4902.0]] * 3


def otherwise(world: lockstep.World) -> str:
    with (
        group_of_its_own(world) as group,
        refused("collective-mismatch", CollectiveMismatch) as refusal,
    ):
        assert group.memory is not None
        group.memory.allocate([1 + 1024 * world.rank], [torch.float32])
    return str(refusal.value.values["calls"])


def test_memory_of_another_size_is_a_mismatch() -> None:
    for calls in on_team(otherwise, 2):
        assert re.match(
            r"rank 0 shared memory of 4096 bytes at test_resident.py:\d+; rank 1 shared memory of"
            r" 8192 bytes",
            calls,
        )


def dies(rank: int, way: str, when: str) -> dict[str, Any]:
    """Rank 1 does; the others return the values of the error that they get."""
    world = lockstep.init(rank=rank, world_size=3, backend="gloo")
    memory = world.group.memory
    assert memory is not None
    (parts,) = memory.allocate([5000], [torch.float32])
    world.barrier()
    for _ in range(20):
        memory.sum_in_place(parts).wait()
    if rank == 1 and when == "before":
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1:  # it says what it is about to do, and dies before its word is there
        memory.written.post = memory.done.post = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
    with refused("peer-has-ended", PeerFailed, peer=1) as refusal:
        if way == "in place":
            memory.sum_in_place(parts).wait()
        else:
            memory.all_reduce(torch.ones(5000)).wait()
    return refusal.value.values


@pytest.mark.parametrize("when", ["in the middle", pytest.param("before", marks=pytest.mark.rest)])
@pytest.mark.parametrize("way", ["in place", "through slots"])
def test_a_dead_rank_is_named_by_all_others_and_leaves_nothing_behind(way: str, when: str) -> None:
    """No launcher here: it would end the others before they could say anything."""
    (first, dead, last), pids = run_siblings(dies, 3, way, when)
    assert dead is None
    for values in (first, last):
        assert values is not None
        assert values["pid"] == pids[1]
        assert re.match(r"its last collective was #\d+: all_reduce", values["last"])
