"""A torch Sampler as an order: its samples, in its order, the same at any place and at any time."""

from __future__ import annotations

import random
import re
import warnings
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
from lockstep.errors import ReplicaDivergence, UsageError
from lockstep.step.stepper import Stepper
from lockstep.testing import run_ranks
from lockstep.world.world import World
from tests.data.chance import places, usual
from tests.data.datasets import Counted, Numbers, draws
from tests.data.orders.samplers import STREAMS, Dealing, Drawing, Remembering, Told
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
    with refused("another-training") as caught:
        loader(sampler).load_state_dict(state)
    assert re.match(
        "order was sampler Remembering.*samples of epoch 0 was", caught.value.values["differences"]
    )


# -- batch samplers --------------------------------------------------------------------------------


def epoch_of_batches(order: FromBatches, epoch: int) -> list[list[int]]:
    return [order.batch(epoch, number).tolist() for number in range(order.count(epoch))]


def test_batches_are_the_samplers() -> None:
    for drop_last, last in ((False, [[6]]), (True, [])):
        order = FromBatches(BatchSampler(SequentialSampler(range(7)), 3, drop_last))
        assert epoch_of_batches(order, 5) == [[0, 1, 2], [3, 4, 5], *last]
    shuffled = FromBatches(BatchSampler(RandomSampler(range(50)), 8, drop_last=False))
    for epoch in range(2):
        assert [len(batch) for batch in epoch_of_batches(shuffled, epoch)] == [8] * 6 + [2]
        assert sorted(
            index for batch in epoch_of_batches(shuffled, epoch) for index in batch
        ) == list(range(50))
    assert epoch_of_batches(shuffled, 0) != epoch_of_batches(shuffled, 1)
    assert epoch_of_batches(FromBatches([[4, 4], (1,), torch.tensor([2, 3])]), 0) == [
        [4, 4],
        [1],
        [2, 3],
    ]  # type: ignore[list-item]


class Fewer(Told):
    """4, 3, 2, 1 batches in epochs 0 to 3."""

    def __iter__(self) -> Any:
        return iter([[self.epoch, number] for number in range(4 - self.epoch)])


def test_their_number_may_change_from_epoch_to_epoch() -> None:
    order = FromBatches(Fewer())
    assert [order.count(epoch) for epoch in (0, 3, 1, 2)] == [4, 1, 3, 2]
    assert epoch_of_batches(order, 2) == [[2, 0], [2, 1]]


def test_a_sampler_of_all_ranks_is_cut_whole_and_without_padding() -> None:
    for rank in range(4):
        inner: DistributedSampler[int] = DistributedSampler(
            range(10), num_replicas=4, rank=rank, seed=3
        )  # type: ignore[arg-type]
        order = torch.randperm(10, generator=torch.Generator().manual_seed(3)).tolist()
        assert epoch_of_batches(FromBatches(BatchSampler(inner, 4, drop_last=False)), 0) == [
            order[:4],
            order[4:8],
            order[8:],
        ]
        assert epoch_of_batches(FromBatches(Dealing(4, rank)), 0) == epoch_of_batches(
            FromBatches(Dealing(1, 0)), 0
        )


def test_a_batch_can_be_changed_without_harm() -> None:
    order = FromBatches([[1, 2], [3]])
    order.batch(0, 0)[:] = 7
    assert epoch_of_batches(order, 0) == [[1, 2], [3]]


def test_the_sampler_is_asked_once_an_epoch_batches() -> None:
    sampler = Remembering(batches=True)
    order = FromBatches(sampler)
    for _ in range(3):
        epoch_of_batches(order, 0)
    assert sampler.asked == 1
    epoch_of_batches(order, 1)
    assert sampler.asked == 2
    with refused("sampler-not-repeatable", sampler="Remembering", epoch=0):
        order.count(0)


def test_digests_tell_apart_where_a_batch_ends() -> None:
    orders = [
        FromBatches(batches)
        for batches in ([[0, 1], [2]], [[0], [1, 2]], [[0, 1, 2]], [[0, 1], [3]])
    ]
    assert (
        len({order.digest(0) for order in orders})
        == len({order.fingerprint() for order in orders})
        == 4
    )
    assert FromBatches([[0, 1], [2]]).digest(0) == FromBatches([(0, 1), (2,)]).digest(0)
    assert FromBatches([[0]], seed=1).fingerprint() != FromBatches([[0]], seed=2).fingerprint()


@pytest.mark.parametrize(
    ("batches", "code", "values"),
    [
        ([[0], []], "not-a-batch", {"name": "list, batch 1 of epoch 0,", "value": []}),
        ([0, 1], "not-a-batch", {"name": "list, batch 0 of epoch 0,", "value": 0}),
        (
            [[0], [3, 8]],
            "not-an-index",
            {"name": "list, batch 1 of epoch 0,", "value": 8, "place": 1, "range": "in [0, 8)"},
        ),
        (
            [[0, 0.5]],
            "not-an-index",
            {"name": "list, batch 0 of epoch 0,", "value": 0.5, "place": 1},
        ),
        ([], "epoch-of-nothing", {"name": "list", "epoch": 0}),
    ],
)
def test_what_are_no_batches_is_refused_at_once(
    batches: Any, code: str, values: dict[str, Any]
) -> None:
    with refused(code, **values):
        FromBatches(batches, length=8)


# -- through a Loader ----------------------------------------------------------------------------


def loader_batches(sampler: Any, dataset: Any = None, **options: Any) -> Loader:
    options = {"micro_batches": 2, "device": "cpu", "rank": 0, "size": 1} | options
    return Loader(Numbers(40) if dataset is None else dataset, order=sampler, **options)


def test_resuming_repeats_indices_and_fetches_no_sample_batches() -> None:
    def sampler() -> Any:
        return BatchSampler(Drawing(40, "numpy"), 3, drop_last=False)

    first, dataset = loader_batches(sampler()), Counted(40)
    undisturbed = [
        [batch.tolist() for batch in window] for epoch in first.epochs(2) for window in epoch
    ]
    epoch = iter(next(first.epochs(2, start=1)))
    for _ in range(3):
        list(next(epoch))
    ours = loader_batches(sampler(), dataset)
    ours.load_state_dict(first.state_dict())
    assert dataset.fetched == []
    window = next(iter(next(ours.epochs(2))))
    assert (window.step, [batch.tolist() for batch in window]) == (10, undisturbed[10])
    assert len(dataset.fetched) == 6


def test_an_epoch_that_became_shorter_is_walked_as_it_is() -> None:
    assert [[window.step for window in epoch] for epoch in loader_batches(Fewer()).epochs(4)] == [
        [0, 1],
        [2, 3],
        [4],
        [5],
    ]


def other_on_rank_1(world: World, ends_elsewhere: bool) -> str:
    model = torch.nn.Linear(1, 1)
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1))
    batches = [[0, 1, 2], [3]] if world.rank and ends_elsewhere else [[0, 1], [2, 3]]
    try:
        for window in next(loader_batches(batches, rank=world.rank, size=world.size).epochs(1)):
            for _ in stepper.micro_batches(window):
                pass
    except ReplicaDivergence as error:
        return str(error)
    except UsageError as error:  # no backward in this test
        return type(error).__name__
    return "nothing said"


def test_batches_that_end_elsewhere_on_one_rank_are_noticed_before_the_first_step() -> None:
    for said in run_ranks(other_on_rank_1, 2, args=(True,)):
        assert said.startswith("order differs: rank 0 has batches of list, epoch 0 ")
    for said in run_ranks(other_on_rank_1, 2, args=(False,)):
        assert "differs" not in said


# -- what a sampler is asked -----------------------------------------------------------------------


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("wrapped", [False, True], ids=["sampler", "in a batch sampler"])
def test_what_is_drawn_is_a_function_of_seed_and_epoch(stream: str, wrapped: bool) -> None:
    def made(seed: int) -> KeyedSampler:
        sampler = Drawing(30, stream)
        return KeyedSampler(BatchSampler(sampler, 4, drop_last=False) if wrapped else sampler, seed)

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
            KeyedSampler(sampler, 0).epoch(1)
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

    found = KeyedSampler(Two(), 0).epoch(0)
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
    assert KeyedSampler(sampler, 0).epoch(0) == list(
        range(samples - samples % size if drop_last else samples)
    )
    sampler.shuffle = True
    assert len(KeyedSampler(sampler, 0).epoch(0)) == (
        samples - samples % size if drop_last else samples
    )
    assert sorted(KeyedSampler(sampler, 0).epoch(0)) == list(range(samples)) or drop_last
    assert (sampler.rank, sampler.epoch) == (0, 0)


def test_blocks_are_put_together_as_blocks() -> None:
    sampler = OurSampler(range(10), 4, 1, shuffle=False, split="blocks")  # type: ignore[arg-type]
    assert KeyedSampler(sampler, 0).epoch(0) == list(range(10))
    batches = BatchSampler(sampler, 4, drop_last=False)
    assert KeyedSampler(batches, 0).epoch(0) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert batches.sampler is sampler


def test_dealt_batches_are_put_together_in_turn() -> None:
    for size in (1, 2, 4):
        assert KeyedSampler(Dealing(size, 0), 0).epoch(0) == [
            [2 * number, 2 * number + 1] for number in range(6)
        ]


@pytest.mark.parametrize("wrapped", [False, True], ids=["sampler", "in a batch sampler"])
def test_a_forgotten_set_epoch_is_said_once_and_corrected(wrapped: bool) -> None:
    inner: DistributedSampler[int] = DistributedSampler(range(20), num_replicas=2, rank=0)  # type: ignore[arg-type]
    asked = KeyedSampler(BatchSampler(inner, 3, drop_last=False) if wrapped else inner, 0)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        epochs = [str(asked.epoch(epoch)) for epoch in range(4)]
    assert [str(each.message) for each in said] == [
        "DistributedSampler.set_epoch(1) was not called, so every epoch would have the same order. Lockstep calls it now, and in later epochs"
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
    asked, told = KeyedSampler(sampler, 0), KeyedSampler(Told(), 0)
    for epoch in range(3):  # warnings are errors
        sampler.set_epoch(epoch)
        asked.epoch(epoch)
        assert told.epoch(epoch)[0] == epoch


def test_what_cannot_be_repeated_is_refused_when_it_is_asked_again() -> None:
    asked = KeyedSampler(Remembering(), 0)
    assert asked.same(0, "a") == "a"
    assert asked.same(1, "b") == "b"
    assert asked.same(0, "a") == "a"
    with refused("sampler-not-repeatable", sampler="Remembering", epoch=1):
        asked.same(1, "c")


@pytest.mark.parametrize("once", [iter([1, 2]), (index for index in [1, 2]), map(int, [1, 2])])
def test_what_can_be_gone_through_once_only_is_refused(once: Any) -> None:
    with refused("sampler-used-up", sampler=type(once).__name__):
        KeyedSampler(once, 0)


def test_an_epoch_of_nothing_is_refused() -> None:
    asked = KeyedSampler(Told(until=1), 0)
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
