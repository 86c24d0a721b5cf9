"""Streams are keyed by what they are for: equal for equal keys, unrelated for others, and a
fetch leaves the process as it was.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Dataset

import lockstep
from lockstep.runtime import randomness
from tests.refused import refused
from tests.teams import on_team


@pytest.fixture(autouse=True)
def _leave_states_alone() -> Iterator[None]:
    randomness._seed = None
    with randomness.preserved():
        yield
    randomness._seed = None


def draw() -> tuple[float, float, float]:
    return torch.rand(()).item(), float(np.random.rand()), random.random()


def test_a_key_gives_the_same_64_bits_on_every_machine() -> None:
    # Recorded once: a change of these numbers changes every training that anybody has recorded.
    assert randomness.derive(0) == 0xE220A8397B1DCDAF  # splitmix64's first output for state 0
    assert randomness.derive(0, 1) == 0x25BA33CC39C0E800
    assert randomness.derive(7, 3, 12, 5) == 0xCF74F08CF49DD919
    assert randomness.order(7, 3) == randomness.derive(7, 5, 3)
    # bits of what is derived differ: it is no plain sum of its key
    assert (
        len({randomness.derive(0, kind, a, b) for kind, a, b in product(range(9), repeat=3)}) == 729
    )


@given(
    st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=4),
    st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=4),
)
def test_different_keys_give_different_numbers(one: list[int], other: list[int]) -> None:
    assert 0 <= randomness.derive(*one) < 2**64
    assert (randomness.derive(*one) == randomness.derive(*other)) == (one == other)


def test_a_stream_begins_with_the_number_of_its_key_whatever_was_drawn_before() -> None:
    for enter, key in (
        (randomness.shared, (1,)),
        (randomness.step, (2, 4, 5)),
        (randomness.sample, (3, 4, 5)),
        (randomness.collate, (4, 4, 5)),
    ):
        draw()
        enter(7, *key[1:])
        drawn = draw()
        randomness.seed_all(randomness.derive(7, *key))
        assert draw() == drawn


def test_seed_all_is_torchs_own_manual_seed() -> None:
    randomness.seed_all(2**64 - 3)
    ours = torch.rand(4)
    torch.manual_seed(2**64 - 3)
    assert torch.equal(ours, torch.rand(4))


def drawn(world: lockstep.World) -> dict[str, tuple[float, float, float]]:
    random.seed(world.rank)
    torch.manual_seed(world.rank)
    np.random.seed(world.rank)
    lockstep.seed(3)
    draws = {"shared": draw()}
    for name, key in (("rank", ()), ("step", (5, 1)), ("sample", (2, 17))):
        with lockstep.stream(name, *key):  # type: ignore[arg-type]
            draws[name] = draw()
    with lockstep.stream("rank", 1):
        draws["rank again"] = draw()
    draws["shared, going on"] = draw()
    return draws


def test_streams_differ_where_they_should_and_leave_the_shared_one_alone() -> None:
    first, second = on_team(drawn, 2)
    for name in first:
        assert (first[name] == second[name]) == (not name.startswith("rank")), name
    assert len(set(first.values())) == len(first)
    lockstep.seed(3)
    shared = [first["shared"], first["shared, going on"]]
    assert shared == [draw(), draw()], "a block draws nothing from the shared stream"


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


def _stream_that_fails() -> None:
    with lockstep.stream("rank"):
        draw()
        raise KeyError


def test_the_states_come_back_after_an_exception_and_the_key_of_an_order_seeds_nothing() -> None:
    lockstep.seed(1)
    expected = draw()
    lockstep.seed(1)
    with pytest.raises(KeyError):
        _stream_that_fails()
    assert len({randomness.order(seed, epoch) for seed in range(10) for epoch in range(10)}) == 100
    assert draw() == expected


def test_what_cannot_be_meant_is_refused() -> None:
    lockstep.seed(0)
    choices = ["rank", "step", "sample"]
    with refused("unknown-choice", value="lane", choices=choices), lockstep.stream("lane"):  # type: ignore[arg-type]
        pass
    with refused("stream-key-wrong", kind="sample", key=[3]), lockstep.stream("sample", 3):
        pass
    with refused("stream-key-wrong", kind="step", key=[]), lockstep.stream("step"):
        pass
    with refused("wrong-value", name="key", value=0.5), lockstep.stream("rank", 0.5):  # type: ignore[arg-type]
        pass


def test_a_seed_comes_first() -> None:
    with refused("seed-not-set"), lockstep.stream("rank"):
        pass
    with refused("wrong-value", name="seed", value=True):
        lockstep.seed(True)
