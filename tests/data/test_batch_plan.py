"""The two courses: positions of an order cut by one plan, and micro-batches that an order makes;
which of them a Loader's arguments mean, and what is refused.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from torch.utils.data import BatchSampler

from lockstep.data.loader import Loader
from lockstep.data.orders import Sequential, Shuffled
from lockstep.data.windows import ByBatch, ByPosition, Plan
from tests.data.datasets import Backwards, Numbers, Pairs
from tests.refused import refused


def picture(batch_plan: Any, epoch: int, size: int) -> list[str]:
    """A line a rank: its micro-batches, one after the other."""
    plan = batch_plan.plan(epoch)
    lines = []
    for rank in range(size):
        slots = plan.cut(0).share(rank, size)
        batches = batch_plan.indices(epoch, range(plan.steps_per_epoch), slots)
        lines.append(" ".join(",".join(map(str, batch)) for batch in batches))
    return lines


def test_batches_are_counted_out_to_the_ranks_by_slots() -> None:
    batch_plan = ByBatch(Pairs(), 2, drop_last=False)
    assert picture(batch_plan, 0, 1) == ["0 1,2 2,3,4"]
    assert picture(batch_plan, 0, 2) == ["0 2,3,4", "1,2"]
    assert picture(batch_plan, 1, 2) == ["0 2,3,4", "1,2 3,4,5,6"]
    assert [batch_plan.plan(epoch).steps_per_epoch for epoch in range(4)] == [2, 2, 3, 3]
    assert [batch_plan.first(epoch) for epoch in (3, 0, 2, 1)] == [7, 0, 4, 2]


def test_the_short_step_of_an_epoch_of_batches_is_dropped_on_all_ranks() -> None:
    batch_plan = ByBatch(Pairs(), 2, drop_last=True)
    assert picture(batch_plan, 0, 2) == ["0", "1,2"]
    assert [batch_plan.first(epoch) for epoch in range(4)] == [0, 1, 3, 5]
    with refused("only-step-dropped", have="3 micro-batches", need="micro_batches=4"):
        ByBatch(Pairs(), 4, drop_last=True).plan(0)


@pytest.mark.parametrize(("samples", "size"), [(30_000, 3), (5, 2)])
def test_an_order_asked_in_pieces_says_the_same(samples: int, size: int) -> None:
    order = Shuffled(samples, 3)
    batch_plan = ByPosition(order, Plan(samples=samples, global_batch=12, micro_batch=5))
    plan = batch_plan.plan(1)
    wanted = order.at(1, np.arange(samples)).tolist()
    for rank in range(size):
        slots = plan.cut(0).share(rank, size)
        batches = batch_plan.indices(1, range(plan.steps_per_epoch), slots)
        cuts = map(plan.cut, range(plan.steps_per_epoch))
        positions = [p for cut in cuts for slot in slots for p in cut.positions(slot)]
        indices = [index for batch in batches for index in batch]
        assert indices == [wanted[position] for position in positions]


def by_batch(rank: int = 0, size: int = 1) -> Loader:
    return Loader(Numbers(30), order=Pairs(), micro_batches=2, rank=rank, size=size, device="cpu")


def test_a_window_of_batches_counts_true_samples() -> None:
    ours, second = by_batch(), by_batch(rank=1, size=2)
    assert [(window.counts, window.samples) for window in next(ours.epochs(1))] == [
        ([1, 2], 3),
        ([3], 3),
    ]
    windows = [(window.counts, list(window.slots)) for window in next(second.epochs(1))]
    assert windows == [([2], [1]), ([], [])]
    assert second.describe() == "2 micro-batches a step, as Pairs makes them; 2 ranks x 1"
    assert not second.depends_on_world_size


@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_rank_knows_how_many_samples_the_others_walk(size: int) -> None:
    def by_sample(rank: int) -> Loader:
        return Loader(
            Numbers(23), global_batch=8, micro_batch=3, rank=rank, size=size, device="cpu"
        )

    for loader in (lambda rank: by_batch(rank=rank, size=size), by_sample):
        for windows in zip(*(next(loader(rank).epochs(1)) for rank in range(size)), strict=True):
            said = [window.samples_by_rank(rank, size) for rank, window in enumerate(windows)]
            assert said == [tuple(window.samples for window in windows)] * size


SIZES = {"global_batch": 8, "micro_batch": 2}


def made(**options: Any) -> Loader:
    return Loader(Numbers(12), device="cpu", rank=0, size=1, **options)


def samples(loader: Loader) -> list[list[int]]:
    return [batch.tolist() for window in next(loader.epochs(1)) for batch in window]


def test_an_order_is_taken_as_it_is() -> None:
    assert isinstance(made(**SIZES).order, Shuffled)
    assert isinstance(made(**SIZES, shuffle=False).order, Sequential)
    assert samples(made(order=Backwards(5), **SIZES)) == [[4, 3], [2, 1], [0]]
    assert isinstance(made(order=Backwards(5), **SIZES).batch_plan, ByPosition)
    assert isinstance(made(order=Pairs(), micro_batches=3).batch_plan, ByBatch)
    assert samples(made(order=[[0, 1, 2], [4]], micro_batches=2)) == [[0, 1, 2], [4]]


def test_what_makes_no_sense_is_refused() -> None:
    with refused("shuffle-and-order", shuffle=True, order="Backwards"):
        made(order=Backwards(12), **SIZES, shuffle=True)
    with refused("micro-batches-not-given", order="Pairs"):
        made(order=Pairs(), **SIZES)
    with refused("micro-batches-not-given", order="BatchSampler"):
        made(order=BatchSampler(range(7), 3, False), **SIZES)
    with refused("micro-batches-and-sizes", micro_batches=2, sizes="global_batch=8"):
        made(order=Pairs(), micro_batches=2, global_batch=8)
    with refused("wrong-value", name="micro_batches", value=0):
        made(order=Pairs(), micro_batches=0)
    with refused("order-without-micro-batches", micro_batches=2, order="NoneType"):
        made(micro_batches=2)
    with refused("order-without-micro-batches", order="Backwards"):
        made(order=Backwards(12), micro_batches=2)
    with refused("not-an-order", order=3):
        made(order=3, **SIZES)
    with refused("not-one-batch-size", global_batch=None, batch_per_rank=None):
        made(order=Backwards(12))
