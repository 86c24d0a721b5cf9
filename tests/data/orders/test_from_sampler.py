"""A torch Sampler as an order: its samples, in its order, the same at any place and at any time."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lockstep.data.loader import Loader
from lockstep.data.orders import FromSampler
from tests.data.chance import places, usual
from tests.data.datasets import Counted, Numbers
from tests.data.orders.samplers import Drawing, Remembering, Told
from tests.refused import refused


def epoch_of(order: FromSampler, epoch: int) -> list[int]:
    return order.at(epoch, np.arange(order.samples, dtype=np.int64)).tolist()


def test_torchs_samplers_mean_what_they_mean() -> None:
    assert epoch_of(FromSampler(SequentialSampler(range(5))), 3) == [0, 1, 2, 3, 4]
    shuffled = FromSampler(RandomSampler(range(50)))
    assert sorted(epoch_of(shuffled, 0)) == sorted(epoch_of(shuffled, 1)) == list(range(50))
    assert epoch_of(shuffled, 0) != epoch_of(shuffled, 1)
    assert sorted(epoch_of(FromSampler(SubsetRandomSampler([7, 3, 5])), 2)) == [3, 5, 7]
    weighted = FromSampler(WeightedRandomSampler([1.0, 0.0, 3.0], 4000))
    counts = places(np.array(epoch_of(weighted, 0)), 3)
    assert counts[1] == 0
    assert usual(counts[[0, 2]], [1000, 3000])
    assert epoch_of(FromSampler([4, 4, 1]), 0) == [4, 4, 1]


def test_a_distributed_sampler_gives_everyones_samples_none_of_them_twice() -> None:
    for rank in range(4):
        sampler: DistributedSampler[int] = DistributedSampler(
            range(10), num_replicas=4, rank=rank, seed=3
        )  # type: ignore[arg-type]
        order = FromSampler(sampler)
        assert sorted(epoch_of(order, 0)) == list(range(10))
        assert (
            epoch_of(order, 0)
            == torch.randperm(10, generator=torch.Generator().manual_seed(3)).tolist()
        )


def test_positions_can_be_asked_for_in_any_shape_and_changed_without_harm() -> None:
    order = FromSampler(Drawing(20, "torch"))
    whole = np.array(epoch_of(order, 1))
    asked = np.array([[19, 0], [5, 5]], dtype=np.int64)
    assert np.array_equal(order.at(1, asked), whole[asked])
    order.at(1, np.arange(20, dtype=np.int64))[:] = 0
    assert np.array_equal(epoch_of(order, 1), whole)


def test_the_sampler_is_asked_once_an_epoch() -> None:
    sampler = Remembering()
    order = FromSampler(sampler)
    for _ in range(3):
        epoch_of(order, 0)
    order.digest(0)
    assert sampler.asked == 1
    epoch_of(order, 1)
    order.digest(1)
    assert sampler.asked == 2
    with refused("sampler-not-repeatable", sampler="Remembering", epoch=0):
        order.at(0, np.array([0], dtype=np.int64))


def test_digests_and_fingerprints_tell_orders_apart() -> None:
    orders = [FromSampler(Drawing(20, "torch"), seed=seed) for seed in (0, 0, 1)]
    assert orders[0].digest(2) == orders[1].digest(2) != orders[2].digest(2)
    assert orders[0].fingerprint() == orders[1].fingerprint() != orders[2].fingerprint()
    assert orders[0].digest(0) != orders[0].digest(1)
    assert FromSampler([1, 2]).fingerprint() != FromSampler([2, 1]).fingerprint()


class Growing(Told):
    def __iter__(self) -> Any:
        return iter(range(8 + self.epoch))


@pytest.mark.parametrize(
    ("sampler", "code", "values"),
    [
        (
            SequentialSampler(range(9)),
            "not-an-index",
            {"name": "SequentialSampler", "value": 8, "place": 8, "range": "in [0, 8)"},
        ),
        ([[0, 1]], "not-an-index", {"name": "list", "value": [0, 1], "place": 0}),
        ([], "epoch-of-nothing", {"name": "list", "epoch": 0}),
    ],
)
def test_what_is_no_order_is_refused_at_once(
    sampler: Any, code: str, values: dict[str, Any]
) -> None:
    with refused(code, **values):
        FromSampler(sampler, length=8)


def test_an_epoch_of_another_length_is_refused() -> None:
    order = FromSampler(Growing())
    with refused("epochs-of-other-length", sampler="Growing", first=8, count=10, epoch=2):
        epoch_of(order, 2)


# -- through a Loader ----------------------------------------------------------------------------


def loader(sampler: Any, dataset: Any = None, **options: Any) -> Loader:
    options = {"global_batch": 8, "micro_batch": 2, "device": "cpu", "rank": 0, "size": 1} | options
    return Loader(Numbers(40) if dataset is None else dataset, order=sampler, **options)


def test_ranks_that_draw_by_their_own_seeds_walk_one_order() -> None:
    seen = []
    for rank in range(2):
        torch.manual_seed(rank)  # as a user does who wants augmentations of their own on every rank
        ours = loader(RandomSampler(range(40)), rank=rank, size=2)
        seen += [
            index for window in next(ours.epochs(1)) for batch in window for index in batch.tolist()
        ]
    assert sorted(seen) == list(range(40))


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
    states = [
        ours.state_dict() | {"epoch": 2, "step_in_epoch": 0, "step": 2} for ours in (one, other)
    ]
    one.load_state_dict(states[0])
    other.load_state_dict(states[1])
    assert one.recipe["samples of epoch 2"] != other.recipe["samples of epoch 2"]


def test_resuming_repeats_indices_and_fetches_no_sample() -> None:
    first, dataset = loader(Drawing(40, "random")), Counted(40)
    undisturbed = [
        [batch.tolist() for batch in window] for epoch in first.epochs(3) for window in epoch
    ]
    epoch = iter(next(first.epochs(2, start=1)))
    for _ in range(3):
        list(next(epoch))
    ours = loader(Drawing(40, "random"), dataset)
    ours.load_state_dict(first.state_dict())
    assert dataset.fetched == []
    window = next(iter(next(ours.epochs(3))))
    assert (window.step, [batch.tolist() for batch in window]) == (8, undisturbed[8])
    assert len(dataset.fetched) == 8


def test_a_sampler_that_cannot_be_repeated_does_not_resume() -> None:
    sampler = Remembering()
    first = loader(sampler)
    epoch = iter(next(first.epochs(1)))
    list(next(epoch))
    state = first.state_dict()
    with refused("state-of-other-training") as caught:
        loader(sampler).load_state_dict(state)
    assert re.match(
        "order was sampler Remembering.*samples of epoch 0 was", caught.value.values["difference"]
    )
