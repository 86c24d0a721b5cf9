"""The two courses: positions of an order cut by one plan, and micro-batches that an order makes;
as pictures.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lockstep.data.batch_plan import ByBatch, ByPosition
from lockstep.data.loader import Loader
from lockstep.data.orders import Sequential, Shuffled
from lockstep.data.windows import Plan
from tests.data.datasets import Backwards, Numbers, Pairs
from tests.refused import refused


def picture(batch_plan: Any, epoch: int, size: int) -> list[str]:
    """A line a rank: its micro-batches, one after the other."""
    plan = batch_plan.plan(epoch)
    return [
        " ".join(
            ",".join(map(str, batch))
            for batch in batch_plan.indices(
                epoch, range(plan.steps_per_epoch), plan.cut(0).share(rank, size)
            )
        )
        for rank in range(size)
    ]


def test_positions_are_cut_and_asked_of_the_order() -> None:
    batch_plan = ByPosition(Backwards(10), Plan(samples=10, global_batch=8, micro_batch=2))
    assert picture(batch_plan, 0, 1) == ["9,8 7,6 5,4 3,2 1,0"]
    assert picture(batch_plan, 0, 3) == ["9,8 7,6 1,0", "5,4", "3,2"]


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
    said = {"when": "epoch 0", "have": "3 micro-batches", "need": "micro_batches=4"}
    with refused("only-step-dropped", **said):
        ByBatch(Pairs(), 4, drop_last=True).plan(0)


@pytest.mark.parametrize(("samples", "size"), [(30_000, 1), (30_000, 3), (5, 2)])
def test_an_order_asked_in_pieces_says_the_same(samples: int, size: int) -> None:
    order = Shuffled(samples, 3)
    batch_plan = ByPosition(order, Plan(samples=samples, global_batch=12, micro_batch=5))
    wanted = order.at(1, np.arange(samples)).tolist()
    for rank in range(size):
        slots = batch_plan.plan(1).cut(0).share(rank, size)
        batches = [
            index
            for batch in batch_plan.indices(1, range(batch_plan.plan(1).steps_per_epoch), slots)
            for index in batch
        ]
        positions = [
            p
            for cut in map(batch_plan.plan(1).cut, range(batch_plan.plan(1).steps_per_epoch))
            for slot in cut.share(rank, size)
            for p in cut.positions(slot)
        ]
        assert batches == [wanted[position] for position in positions]


def test_an_order_is_asked_for_many_positions_at_once_and_never_for_all() -> None:
    asked: list[int] = []

    class Noting(Sequential):
        def at(self, epoch: int, positions: Any) -> Any:
            asked.append(len(positions))
            return super().at(epoch, positions)

    batch_plan = ByPosition(Noting(10**12), Plan(samples=10**12, global_batch=64, micro_batch=32))
    indices = batch_plan.indices(0, range(10**9, batch_plan.plan(0).steps_per_epoch), range(2))
    assert next(indices)[:2] == [64 * 10**9, 64 * 10**9 + 1]
    assert asked == [4096]


def by_batch(rank: int = 0, size: int = 1, **options: Any) -> Loader:
    return Loader(
        Numbers(30), order=Pairs(), micro_batches=2, rank=rank, size=size, device="cpu", **options
    )


def test_a_window_of_batches_counts_true_samples() -> None:
    found = [
        (window.counts, window.samples, [len(batch) for batch in window])
        for window in next(by_batch().epochs(1))
    ]
    assert found == [([1, 2], 3, [1, 2]), ([3], 3, [3])]
    second = [
        (window.counts, list(window.slots)) for window in next(by_batch(rank=1, size=2).epochs(1))
    ]
    assert second == [([2], [1]), ([], [])]


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


def test_a_loader_of_batches_says_what_it_does() -> None:
    loader = by_batch(size=3)
    assert (
        loader.describe() == "2 micro-batches a step, as Pairs makes them; 3 ranks: 2 x 1, 1 idle"
    )
    assert not loader.depends_on_world_size
    assert [len(epoch) for epoch in loader.epochs(4)] == [2, 2, 3, 3]
