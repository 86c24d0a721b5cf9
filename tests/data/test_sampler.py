"""torch's DistributedSampler, index for index; blocks; data sets shorter than the padding."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DistributedSampler as TorchSampler

from lockstep.data.sampler import DistributedSampler
from lockstep.world.world import World
from tests.refused import refused
from tests.teams import on_team


def data(samples: int) -> Any:
    return range(samples)


def ranks_of(samples: int, size: int, **options: Any) -> list[list[int]]:
    return [list(DistributedSampler(data(samples), size, rank, **options)) for rank in range(size)]


SAMPLES, RANKS = st.integers(1, 40), st.integers(1, 12)


@given(SAMPLES, RANKS, st.booleans(), st.booleans(), st.integers(0, 2**40), st.data())
def test_interleaved_is_torchs(
    samples: int, size: int, shuffle: bool, drop_last: bool, seed: int, draw: st.DataObject
) -> None:
    rank, epoch = draw.draw(st.integers(0, size - 1)), draw.draw(st.integers(0, 5))
    ours = DistributedSampler(data(samples), size, rank, shuffle, seed, drop_last)
    torchs = TorchSampler(data(samples), size, rank, shuffle, seed, drop_last)
    before = torch.get_rng_state()
    for sampler in (ours, torchs):
        sampler.set_epoch(epoch)
    assert list(ours) == list(torchs)
    assert torch.equal(torch.get_rng_state(), before)
    assert len(ours) == len(torchs)
    assert (ours.num_samples, ours.total_size) == (torchs.num_samples, torchs.total_size)


def test_ten_samples_on_four_ranks() -> None:
    assert ranks_of(10, 4, shuffle=False) == [[0, 4, 8], [1, 5, 9], [2, 6, 0], [3, 7, 1]]
    blocks = [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 0, 1]]
    assert ranks_of(10, 4, shuffle=False, split="blocks") == blocks


@given(SAMPLES, RANKS, st.booleans(), st.integers(0, 3))
def test_blocks_are_the_same_order_cut_otherwise(
    samples: int, size: int, drop_last: bool, epoch: int
) -> None:
    def flat(split: str) -> list[int]:
        parts = []
        for rank in range(size):
            sampler = DistributedSampler(data(samples), size, rank, True, 5, drop_last, split)  # type: ignore[arg-type]
            sampler.set_epoch(epoch)
            parts.append(list(sampler))
        if split == "interleaved":
            return [index for row in zip(*parts, strict=True) for index in row]
        return [index for part in parts for index in part]

    assert flat("blocks") == flat("interleaved")


def test_without_a_process_group_there_is_one_rank() -> None:
    sampler = DistributedSampler(data(5), shuffle=False)
    assert (sampler.rank, sampler.num_replicas, list(sampler)) == (0, 1, [0, 1, 2, 3, 4])


def by_default(world: World) -> list[int]:
    return list(DistributedSampler(data(10), shuffle=False))


def test_ranks_come_from_the_process_group() -> None:
    assert on_team(by_default, 2) == [[0, 2, 4, 6, 8], [1, 3, 5, 7, 9]]


def test_mistakes_are_named() -> None:
    for size, rank in ((4, 4), (4, -1), (0, 0)):
        with refused("no-such-rank", rank=rank, name="num_replicas", size=size):
            DistributedSampler(data(10), size, rank)
    with refused("unknown-choice", name="split", value="stripes"):
        DistributedSampler(data(10), 4, 0, split="stripes")  # type: ignore[arg-type]
    with refused("empty-dataset"):
        DistributedSampler(data(0), 4, 0)
    with refused("not-a-loaders-dataset", what="list_iterator"):
        DistributedSampler(iter([1]), 4, 0)  # type: ignore[arg-type]
