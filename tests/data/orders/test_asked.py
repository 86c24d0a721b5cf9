"""A user's sampler is asked under keyed randomness: the same on every rank, another every epoch,
and the caller's streams are left alone.
"""

from __future__ import annotations

import random
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DistributedSampler

from lockstep.data.orders.asked import Asked, indices
from lockstep.data.sampler import DistributedSampler as OurSampler
from tests.data.datasets import draws
from tests.data.orders.samplers import STREAMS, Dealing, Drawing, Remembering, Told
from tests.refused import refused


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("wrapped", [False, True], ids=["sampler", "in a batch sampler"])
def test_what_is_drawn_is_a_function_of_seed_and_epoch(stream: str, wrapped: bool) -> None:
    def made(seed: int) -> Asked:
        sampler = Drawing(30, stream)
        return Asked(BatchSampler(sampler, 4, drop_last=False) if wrapped else sampler, seed)

    torch.manual_seed(1)
    one = made(5)
    walked = [one.epoch(epoch) for epoch in (0, 1, 2)]
    torch.manual_seed(2)
    np.random.seed(2)
    random.seed(2)
    assert [made(5).epoch(epoch) for epoch in (2, 0)] == [walked[2], walked[0]]
    assert one.epoch(1) == walked[1]
    assert walked[0] != walked[1] != walked[2]
    assert made(6).epoch(0) != walked[0]


@pytest.mark.parametrize("stream", STREAMS)
def test_the_callers_streams_go_on_as_if_nobody_had_asked(stream: str) -> None:
    def state(sampler: Drawing) -> list[Any]:
        return [draws().tolist(), list(sampler), draws().tolist()]

    found = []
    for asks in (False, True):
        sampler = Drawing(10, stream)
        for generator in (random, np.random):
            generator.seed(3)
        torch.manual_seed(3)
        if isinstance(sampler.generator, torch.Generator):
            sampler.generator.manual_seed(3)
        elif isinstance(sampler.generator, np.random.Generator):
            sampler.generator.bit_generator.state = np.random.PCG64(3).state
        elif sampler.generator is not None:
            sampler.generator.seed(3)
        if asks:
            Asked(sampler, 0).epoch(1)
        found.append(state(sampler))
    assert found[0] == found[1]


def test_two_generators_of_one_sampler_draw_apart() -> None:
    class Two:
        def __init__(self) -> None:
            self.one, self.other = torch.Generator(), torch.Generator()

        def __iter__(self) -> Any:
            return iter(
                [torch.randperm(50, generator=each).tolist() for each in (self.one, self.other)]
            )

    found = Asked(Two(), 0).epoch(0)
    assert found[0] != found[1]


@pytest.mark.parametrize(
    ("samples", "size", "drop_last"),
    [(10, 4, False), (10, 4, True), (8, 4, False), (3, 5, False), (7, 1, False)],
)
@pytest.mark.parametrize("make", [DistributedSampler, OurSampler])
def test_what_ranks_were_dealt_is_put_together_again_without_the_padding(
    make: Any, samples: int, size: int, drop_last: bool
) -> None:
    sampler = make(range(samples), num_replicas=size, rank=0, shuffle=False, drop_last=drop_last)
    assert Asked(sampler, 0).epoch(0) == list(
        range(samples - samples % size if drop_last else samples)
    )
    sampler.shuffle = True
    assert len(Asked(sampler, 0).epoch(0)) == (samples - samples % size if drop_last else samples)
    assert sorted(Asked(sampler, 0).epoch(0)) == list(range(samples)) or drop_last
    assert (sampler.rank, sampler.epoch) == (0, 0)


def test_blocks_are_put_together_as_blocks() -> None:
    sampler = OurSampler(range(10), 4, 1, shuffle=False, split="blocks")  # type: ignore[arg-type]
    assert Asked(sampler, 0).epoch(0) == list(range(10))
    batches = BatchSampler(sampler, 4, drop_last=False)
    assert Asked(batches, 0).epoch(0) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert batches.sampler is sampler


def test_dealt_batches_are_put_together_in_turn() -> None:
    for size in (1, 2, 4):
        assert Asked(Dealing(size, 0), 0).epoch(0) == [
            [2 * number, 2 * number + 1] for number in range(6)
        ]


@pytest.mark.parametrize("wrapped", [False, True], ids=["sampler", "in a batch sampler"])
def test_a_forgotten_set_epoch_is_said_once_and_corrected(wrapped: bool) -> None:
    inner: DistributedSampler[int] = DistributedSampler(range(20), num_replicas=2, rank=0)  # type: ignore[arg-type]
    asked = Asked(BatchSampler(inner, 3, drop_last=False) if wrapped else inner, 0)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        epochs = [str(asked.epoch(epoch)) for epoch in range(4)]
    assert [str(each.message) for each in said] == [
        "DistributedSampler.set_epoch(1) was not called, and without it every epoch has the same"
        " order: calling it for you, now and in later epochs"
    ]
    assert len(set(epochs)) == 4
    inner.set_epoch(2)
    # one rank's
    assert (
        str(
            [list(each) for each in BatchSampler(inner, 3, drop_last=False)]
            if wrapped
            else list(inner)
        )
        not in epochs
    )
    assert inner.epoch == 2  # the user's is told on a copy


def test_who_calls_set_epoch_and_who_deals_nothing_hears_nothing() -> None:
    sampler: DistributedSampler[int] = DistributedSampler(range(20), num_replicas=2, rank=0)  # type: ignore[arg-type]
    asked, told = Asked(sampler, 0), Asked(Told(), 0)
    for epoch in range(3):  # warnings are errors
        sampler.set_epoch(epoch)
        asked.epoch(epoch)
        assert told.epoch(epoch)[0] == epoch


def test_what_cannot_be_repeated_is_refused_when_it_is_asked_again() -> None:
    asked = Asked(Remembering(), 0)
    assert asked.same(0, "a") == "a"
    assert asked.same(1, "b") == "b"
    assert asked.same(0, "a") == "a"
    with refused("sampler-not-repeatable", sampler="Remembering", epoch=1):
        asked.same(1, "c")


@pytest.mark.parametrize("once", [iter([1, 2]), (index for index in [1, 2]), map(int, [1, 2])])
def test_what_can_be_gone_through_once_only_is_refused(once: Any) -> None:
    with refused("sampler-used-up", sampler=type(once).__name__):
        Asked(once, 0)


def test_an_epoch_of_nothing_is_refused() -> None:
    asked = Asked(Told(until=1), 0)
    assert len(asked.epoch(0)) == 8
    with refused("epoch-of-nothing", name="Told", epoch=1):
        asked.epoch(1)


@pytest.mark.parametrize("values", [[3, 0], [np.int32(3), 0], [torch.tensor(3), np.uint8(0)]])
def test_indices_of_all_makes(values: list[Any]) -> None:
    found = indices("It", values, 4)
    assert (found.dtype, found.tolist()) == (np.int64, [3, 0])
    assert indices("It", [2**63 - 1], None).tolist() == [2**63 - 1]


@pytest.mark.parametrize(
    ("values", "length", "place", "range"),
    [
        ([0, 4, 5], 4, 1, "in [0, 4)"),
        ([0, 1, -1], 4, 2, "in [0, 4)"),
        ([-1], None, 0, "0 or more"),
        ([0, 1.0], 4, 1, "a whole number"),
        ([0, True], 4, 1, "a whole number"),
        ([0, "1"], 4, 1, "a whole number"),
        ([0, torch.tensor(1.0)], 4, 1, "a whole number"),
        ([[0, 1]], 4, 0, "a whole number"),
    ],
)
def test_what_is_no_index_is_refused(
    values: list[Any], length: int | None, place: int, range: str
) -> None:
    with refused("not-an-index", name="It", value=values[place], place=place, range=range):
        indices("It", values, length)
