"""`lockstep.seed` and `lockstep.stream`: keyed randomness for plain scripts, the same streams
that Stepper and Loader enter.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

import lockstep
from lockstep.runtime import streams
from lockstep.testing import run_ranks
from tests.refused import refused


@pytest.fixture(autouse=True)
def unseeded() -> Iterator[None]:
    streams._seed = None
    yield
    streams._seed = None


def draw() -> tuple[float, float, float]:
    return torch.rand(()).item(), float(np.random.rand()), random.random()


def drawn(world: lockstep.World) -> dict[str, tuple[float, float, float]]:
    random.seed(world.rank)
    torch.manual_seed(world.rank)
    np.random.seed(world.rank)
    lockstep.seed(3)
    found = {"shared": draw()}
    for name, key in (("rank", ()), ("step", (5, 1)), ("sample", (2, 17))):
        with lockstep.stream(name, *key):  # type: ignore[arg-type]
            found[name] = draw()
    with lockstep.stream("rank", 1):
        found["rank again"] = draw()
    found["shared, going on"] = draw()
    return found


def test_streams_differ_where_they_should_and_leave_the_shared_one_alone() -> None:
    first, second = run_ranks(drawn, 2)
    for name in first:
        assert (first[name] == second[name]) == (not name.startswith("rank")), name
    assert len(set(first.values())) == len(first)
    lockstep.seed(3)
    assert [first["shared"], first["shared, going on"]] == [
        draw(),
        draw(),
    ], "a block draws nothing from the shared stream"


class Drawing(Dataset[Any]):
    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([index, *draw()], dtype=torch.float64)


def test_they_are_the_streams_of_loader_and_stepper() -> None:
    with lockstep.init():
        lockstep.seed(3)
        loader = lockstep.Loader(Drawing(), global_batch=4, micro_batch=2, seed=3)
        for epoch in loader.epochs(2):
            for window in epoch:
                for index, *values in torch.cat(list(window)).tolist():
                    with lockstep.stream("sample", epoch.number, int(index)):
                        assert tuple(values) == draw()
        model = torch.nn.Linear(1, 1)
        stepper = lockstep.Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1), seed=3)
        for window in next(loader.epochs(1)):
            for slot, _ in enumerate(stepper.micro_batches(window)):
                ours = draw()
                with lockstep.stream("step", window.step, slot):
                    assert draw() == ours
                stepper.backward(model(torch.ones(1)).sum(), weight=1)
            stepper.step()


def test_the_states_come_back_after_an_exception() -> None:
    lockstep.seed(1)
    expected = draw()
    lockstep.seed(1)

    def fails() -> None:
        with lockstep.stream("rank"):
            draw()
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert draw() == expected


@pytest.mark.parametrize(
    ("arguments", "code", "values"),
    [
        (("lane",), "unknown-choice", {"value": "lane", "choices": ["rank", "step", "sample"]}),
        (("sample", 3), "stream-key-wrong", {"kind": "sample", "key": [3]}),
        (("step",), "stream-key-wrong", {"kind": "step", "key": []}),
        (("rank", 0.5), "not-a-whole-number", {"name": "key", "value": 0.5}),
    ],
)
def test_what_cannot_be_meant_is_refused(
    arguments: tuple[Any, ...], code: str, values: dict[str, Any]
) -> None:
    lockstep.seed(0)
    with refused(code, **values), lockstep.stream(*arguments):
        pass


def test_a_seed_comes_first() -> None:
    with (
        refused("seed-not-set"),
        lockstep.stream("rank"),
    ):
        pass
    with refused("not-a-whole-number", name="seed", value=True):
        lockstep.seed(True)
