"""A torch BatchSampler as micro-batches: its batches, as many as it makes, the same on every
rank.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, SequentialSampler

from lockstep.data.loader import Loader
from lockstep.data.orders import FromBatches
from lockstep.errors import ReplicaDivergence, UsageError
from lockstep.step.stepper import Stepper
from lockstep.testing import run_ranks
from lockstep.world.world import World
from tests.data.datasets import Counted, Numbers
from tests.data.orders.samplers import Dealing, Drawing, Remembering, Told
from tests.refused import refused


def epoch_of(order: FromBatches, epoch: int) -> list[list[int]]:
    return [order.batch(epoch, number).tolist() for number in range(order.count(epoch))]


def test_batches_are_the_samplers() -> None:
    for drop_last, last in ((False, [[6]]), (True, [])):
        order = FromBatches(BatchSampler(SequentialSampler(range(7)), 3, drop_last))
        assert epoch_of(order, 5) == [[0, 1, 2], [3, 4, 5], *last]
    shuffled = FromBatches(BatchSampler(RandomSampler(range(50)), 8, drop_last=False))
    for epoch in range(2):
        assert [len(batch) for batch in epoch_of(shuffled, epoch)] == [8] * 6 + [2]
        assert sorted(index for batch in epoch_of(shuffled, epoch) for index in batch) == list(
            range(50)
        )
    assert epoch_of(shuffled, 0) != epoch_of(shuffled, 1)
    assert epoch_of(FromBatches([[4, 4], (1,), torch.tensor([2, 3])]), 0) == [[4, 4], [1], [2, 3]]  # type: ignore[list-item]


class Fewer(Told):
    """4, 3, 2, 1 batches in epochs 0 to 3."""

    def __iter__(self) -> Any:
        return iter([[self.epoch, number] for number in range(4 - self.epoch)])


def test_their_number_may_change_from_epoch_to_epoch() -> None:
    order = FromBatches(Fewer())
    assert [order.count(epoch) for epoch in (0, 3, 1, 2)] == [4, 1, 3, 2]
    assert epoch_of(order, 2) == [[2, 0], [2, 1]]


def test_a_sampler_of_all_ranks_is_cut_whole_and_without_padding() -> None:
    for rank in range(4):
        inner: DistributedSampler[int] = DistributedSampler(
            range(10), num_replicas=4, rank=rank, seed=3
        )  # type: ignore[arg-type]
        order = torch.randperm(10, generator=torch.Generator().manual_seed(3)).tolist()
        assert epoch_of(FromBatches(BatchSampler(inner, 4, drop_last=False)), 0) == [
            order[:4],
            order[4:8],
            order[8:],
        ]
        assert epoch_of(FromBatches(Dealing(4, rank)), 0) == epoch_of(FromBatches(Dealing(1, 0)), 0)


def test_a_batch_can_be_changed_without_harm() -> None:
    order = FromBatches([[1, 2], [3]])
    order.batch(0, 0)[:] = 7
    assert epoch_of(order, 0) == [[1, 2], [3]]


def test_the_sampler_is_asked_once_an_epoch() -> None:
    sampler = Remembering(batches=True)
    order = FromBatches(sampler)
    for _ in range(3):
        epoch_of(order, 0)
    assert sampler.asked == 1
    epoch_of(order, 1)
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


def loader(sampler: Any, dataset: Any = None, **options: Any) -> Loader:
    options = {"micro_batches": 2, "device": "cpu", "rank": 0, "size": 1} | options
    return Loader(Numbers(40) if dataset is None else dataset, order=sampler, **options)


def test_resuming_repeats_indices_and_fetches_no_sample() -> None:
    def sampler() -> Any:
        return BatchSampler(Drawing(40, "numpy"), 3, drop_last=False)

    first, dataset = loader(sampler()), Counted(40)
    undisturbed = [
        [batch.tolist() for batch in window] for epoch in first.epochs(2) for window in epoch
    ]
    epoch = iter(next(first.epochs(2, start=1)))
    for _ in range(3):
        list(next(epoch))
    ours = loader(sampler(), dataset)
    ours.load_state_dict(first.state_dict())
    assert dataset.fetched == []
    window = next(iter(next(ours.epochs(2))))
    assert (window.step, [batch.tolist() for batch in window]) == (10, undisturbed[10])
    assert len(dataset.fetched) == 6


def test_an_epoch_that_became_shorter_is_walked_as_it_is() -> None:
    assert [[window.step for window in epoch] for epoch in loader(Fewer()).epochs(4)] == [
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
        for window in next(loader(batches, rank=world.rank, size=world.size).epochs(1)):
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
