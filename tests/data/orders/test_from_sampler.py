"""A torch Sampler as an order: its samples, in its order, the same at any place and at any time."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lockstep.data.loader import Loader
from lockstep.data.orders import FromBatches, FromSampler
from lockstep.data.orders.from_sampler import KeyedSampler, indices
from lockstep.data.sampler import DistributedSampler as OurSampler
from tests.data.datasets import Numbers, draws
from tests.data.orders.samplers import STREAMS, Dealing, Drawing, Remembering, Told
from tests.data.orders.test_order import epoch_of
from tests.refused import refused


def distributed(samples: int, size: int, rank: int, **options: Any) -> Any:
    return DistributedSampler(range(samples), num_replicas=size, rank=rank, **options)  # type: ignore[arg-type]


def batches_of(sampler: Any, size: int, drop_last: bool = False) -> Any:
    return BatchSampler(sampler, size, drop_last)


def test_torchs_samplers_mean_what_they_mean() -> None:
    assert epoch_of(FromSampler(SequentialSampler(range(5))), 3) == [0, 1, 2, 3, 4]
    assert sorted(epoch_of(FromSampler(RandomSampler(range(50))), 1)) == list(range(50))
    assert sorted(epoch_of(FromSampler(SubsetRandomSampler([7, 3, 5])), 2)) == [3, 5, 7]
    assert 1 not in epoch_of(FromSampler(WeightedRandomSampler([1.0, 0.0, 3.0], 400)), 0)
    assert epoch_of(FromSampler([4, 4, 1]), 0) == [4, 4, 1]
    for drop_last, last in ((False, [[6]]), (True, [])):
        order = FromBatches(batches_of(SequentialSampler(range(7)), 3, drop_last))
        assert epoch_of(order, 5) == [[0, 1, 2], [3, 4, 5], *last]
    mixed: Any = [[4, 4], (1,), torch.tensor([2, 3])]
    assert epoch_of(FromBatches(mixed), 0) == [[4, 4], [1], [2, 3]]


@pytest.mark.parametrize("batches", [False, True])
def test_the_sampler_is_asked_once_an_epoch(batches: bool) -> None:
    sampler = Remembering(batches)
    order = FromBatches(sampler) if batches else FromSampler(sampler)
    for epoch in (0, 1):
        for _ in range(3):
            epoch_of(order, epoch)
        order.digest(epoch)
        assert sampler.asked == epoch + 1
    with refused("sampler-not-repeatable", sampler="Remembering", epoch=0):
        order.digest(0)


class Growing(Told):
    def __iter__(self) -> Any:
        return iter(range(8 + self.epoch))


class Fewer(Told):
    """4, 3, 2, 1 batches in epochs 0 to 3."""

    def __iter__(self) -> Any:
        return iter([[self.epoch, number] for number in range(4 - self.epoch)])


def test_epochs_of_other_lengths_are_refused_of_samples_and_taken_of_batches() -> None:
    with refused("epochs-of-other-length", sampler="Growing", first=8, count=10, epoch=2):
        epoch_of(FromSampler(Growing()), 2)
    order = FromBatches(Fewer())
    assert [order.count(epoch) for epoch in (0, 3, 1, 2)] == [4, 1, 3, 2]
    assert epoch_of(order, 2) == [[2, 0], [2, 1]]
    order.batch(2, 0)[:] = 7  # without harm
    assert epoch_of(order, 2) == [[2, 0], [2, 1]]
    steps = [[window.step for window in epoch] for epoch in loader(Fewer(), batches=True).epochs(4)]
    assert steps == [[0, 1], [2, 3], [4], [5]]


BATCH_0, BATCH_1 = "list, batch 0 of epoch 0,", "list, batch 1 of epoch 0,"


@pytest.mark.parametrize(
    ("order", "sampler", "code", "values"),
    [
        (FromSampler, SequentialSampler(range(9)), "not-an-index", {"value": 8, "place": 8}),
        (FromSampler, [], "epoch-of-nothing", {"name": "list", "epoch": 0}),
        (FromBatches, [[0], []], "not-a-batch", {"name": BATCH_1, "value": []}),
        (FromBatches, [0, 1], "not-a-batch", {"name": BATCH_0, "value": 0}),
        (FromBatches, [[0], [3, 8]], "not-an-index", {"name": BATCH_1, "value": 8, "place": 1}),
        (FromBatches, [], "epoch-of-nothing", {"name": "list", "epoch": 0}),
    ],
)
def test_what_is_no_order_is_refused_at_once(
    order: Any, sampler: Any, code: str, values: dict[str, Any]
) -> None:
    with refused(code, **values):
        order(sampler, length=8)


def loader(sampler: Any, batches: bool = False) -> Loader:
    sizes = {"micro_batches": 2} if batches else {"global_batch": 8, "micro_batch": 2}
    return Loader(Numbers(40), order=sampler, **sizes, device="cpu", rank=0, size=1)  # type: ignore[arg-type]


def test_an_order_that_is_another_on_one_rank_is_in_what_ranks_compare() -> None:
    class FromTwo(Told):
        def __iter__(self) -> Any:
            return iter(range(8) if self.epoch < 2 else reversed(range(8)))

    one, other = loader(FromTwo()), loader(SequentialSampler(range(8)))
    other_name = {**other.recipe, "order": one.recipe["order"]}
    # the same samples, in epoch 0
    assert {name for name in one.recipe if one.recipe[name] != other_name[name]} == set()
    for ours in (one, other):
        list(map(list, next(ours.epochs(2, start=1))))
        ours.load_state_dict(ours.state_dict() | {"epoch": 2, "step_in_epoch": 0, "step": 2})
    assert one.recipe["samples of epoch 2"] != other.recipe["samples of epoch 2"]


# -- what a sampler is asked -----------------------------------------------------------------------


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("wrapped", [False, True], ids=["sampler", "in a batch sampler"])
def test_what_is_drawn_is_a_function_of_seed_and_epoch(stream: str, wrapped: bool) -> None:
    def made(seed: int) -> KeyedSampler:
        sampler = Drawing(30, stream)
        return KeyedSampler(batches_of(sampler, 4) if wrapped else sampler, seed)

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
    states = []
    for asks in (False, True):
        sampler = Drawing(10, stream)
        for library in (random, np.random):
            library.seed(3)
        torch.manual_seed(3)
        if isinstance(sampler.generator, torch.Generator):
            sampler.generator.manual_seed(3)
        elif isinstance(sampler.generator, np.random.Generator):
            sampler.generator.bit_generator.state = np.random.PCG64(3).state
        elif sampler.generator is not None:
            sampler.generator.seed(3)
        if asks:
            KeyedSampler(sampler, 0).epoch(1)
        states.append([draws().tolist(), list(sampler), draws().tolist()])
    assert states[0] == states[1]


def test_two_generators_of_one_sampler_draw_apart() -> None:
    class Two:
        def __init__(self) -> None:
            self.generators = torch.Generator(), torch.Generator()
            self.one, self.other = self.generators

        def __iter__(self) -> Any:
            return iter([torch.randperm(50, generator=one).tolist() for one in self.generators])

    one, other = KeyedSampler(Two(), 0).epoch(0)
    assert one != other


@pytest.mark.parametrize(
    ("samples", "size", "drop_last"),
    [(10, 4, False), (10, 4, True), (8, 4, False), (3, 5, False), (7, 1, False)],
)
@pytest.mark.parametrize("make", [DistributedSampler, OurSampler])
def test_what_ranks_were_dealt_is_put_together_again_without_the_padding(
    make: Any, samples: int, size: int, drop_last: bool
) -> None:
    sampler = make(range(samples), num_replicas=size, rank=0, shuffle=False, drop_last=drop_last)
    rest = samples - samples % size if drop_last else samples
    assert KeyedSampler(sampler, 0).epoch(0) == list(range(rest))
    sampler.shuffle = True
    shuffled = KeyedSampler(sampler, 0).epoch(0)
    assert len(set(shuffled)) == len(shuffled) == rest
    assert set(shuffled) <= set(range(samples))
    assert (sampler.rank, sampler.epoch) == (0, 0)


def test_batches_of_all_ranks_are_put_together() -> None:
    """Whether ranks were dealt single samples, blocks of them or batches."""
    order = torch.randperm(10, generator=torch.Generator().manual_seed(3)).tolist()
    for rank in range(4):
        sampler = distributed(10, 4, rank, seed=3)
        batches = KeyedSampler(batches_of(sampler, 4), 0).epoch(0)
        assert batches == [order[:4], order[4:8], order[8:]]
    blocks = batches_of(OurSampler(range(10), 4, 1, shuffle=False, split="blocks"), 4)  # type: ignore[arg-type]
    sampler = blocks.sampler
    assert KeyedSampler(sampler, 0).epoch(0) == list(range(10))
    assert KeyedSampler(blocks, 0).epoch(0) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert blocks.sampler is sampler
    for size in (1, 2, 4):
        dealt = KeyedSampler(Dealing(size, 0), 0).epoch(0)
        assert dealt == [[2 * number, 2 * number + 1] for number in range(6)]


def test_a_forgotten_set_epoch_is_corrected_also_inside_a_batch_sampler() -> None:
    inner = distributed(20, 2, 0)
    sampler = batches_of(inner, 3)
    asked = KeyedSampler(sampler, 0)
    with pytest.warns(
        UserWarning, match=r"DistributedSampler.set_epoch\(1\) was not called"
    ) as said:
        epochs = [asked.epoch(epoch) for epoch in range(4)]
    assert len(said) == 1
    assert len({str(epoch) for epoch in epochs}) == 4
    inner.set_epoch(2)
    assert list(sampler) not in epochs  # one rank's
    assert inner.epoch == 2  # the user's is told on a copy


def test_what_gives_no_epoch_is_refused() -> None:
    for once in (iter([1, 2]), (index for index in [1, 2]), map(int, [1, 2])):
        with refused("sampler-used-up", sampler=type(once).__name__):
            KeyedSampler(once, 0)
    asked = KeyedSampler(Told(until=1), 0)
    assert len(asked.epoch(0)) == 8
    with refused("epoch-of-nothing", name="Told", epoch=1):
        asked.epoch(1)


def test_indices_of_all_makes() -> None:
    for values in ([3, 0], [np.int32(3), 0], [torch.tensor(3), np.uint8(0)]):
        converted = indices("It", values, 4)
        assert (converted.dtype, converted.tolist()) == (np.int64, [3, 0])
    assert indices("It", [2**63 - 1], None).tolist() == [2**63 - 1]
    for values, place in (([0, 4, 5], 1), ([0, 1, -1], 2)):
        with refused("not-an-index", name="It", place=place, range="in [0, 4)"):
            indices("It", values, 4)
    with refused("not-an-index", value=-1, place=0, range="0 or more"):
        indices("It", [-1], None)
    for value in (1.0, True, "1", torch.tensor(1.0), [0, 1]):
        with refused("not-an-index", value=value, place=1, range="a whole number"):
            indices("It", [0, value], 4)
