"""Which batch_plan a Loader's arguments mean, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

from lockstep.data.batch_plan import ByBatch, ByPosition
from lockstep.data.loader import Loader
from lockstep.data.orders import Sequential, Shuffled
from tests.data.datasets import Backwards, Numbers, Pairs
from tests.refused import refused

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


def test_torchs_samplers_are_wrapped() -> None:
    assert samples(made(order=SequentialSampler(range(5)), **SIZES)) == [[0, 1], [2, 3], [4]]
    shuffled = made(
        order=RandomSampler(range(12), generator=torch.Generator().manual_seed(1)), **SIZES
    )
    assert sorted(index for batch in samples(shuffled) for index in batch) == list(range(12))
    batches = BatchSampler(SequentialSampler(range(7)), batch_size=3, drop_last=False)
    assert samples(made(order=batches, micro_batches=2)) == [[0, 1, 2], [3, 4, 5], [6]]
    assert samples(made(order=[[0, 1, 2], [4]], micro_batches=2)) == [[0, 1, 2], [4]]


@pytest.mark.parametrize(
    ("options", "code", "values"),
    [
        (
            {"order": Backwards(12), **SIZES, "shuffle": True},
            "shuffle-and-order",
            {"shuffle": True, "order": "Backwards"},
        ),
        ({"order": Pairs(), **SIZES}, "micro-batches-not-given", {"order": "Pairs"}),
        (
            {"order": BatchSampler(SequentialSampler(range(7)), 3, False), **SIZES},
            "micro-batches-not-given",
            {"order": "BatchSampler"},
        ),
        (
            {"order": Pairs(), "micro_batches": 2, "global_batch": 8},
            "micro-batches-and-sizes",
            {"micro_batches": 2, "sizes": "global_batch=8"},
        ),
        (
            {"order": Pairs(), "micro_batches": 0},
            "wrong-value",
            {"name": "micro_batches", "value": 0},
        ),
        (
            {"micro_batches": 2},
            "order-without-micro-batches",
            {"micro_batches": 2, "order": "NoneType"},
        ),
        (
            {"order": Backwards(12), "micro_batches": 2},
            "order-without-micro-batches",
            {"order": "Backwards"},
        ),
        ({"order": 3, **SIZES}, "not-an-order", {"order": 3}),
        (
            {"order": Backwards(12)},
            "not-one-batch-size",
            {"global_batch": None, "batch_per_rank": None},
        ),
    ],
)
def test_what_makes_no_sense_is_refused(
    options: dict[str, Any], code: str, values: dict[str, Any]
) -> None:
    with refused(code, **values):
        made(**options)
