"""Nothing is seeded until something is drawn, and that changes no draw: each library, each way
of drawing, at any moment.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from lockstep.data.generators import Streams
from lockstep.data.keyed import KeyedDataset
from lockstep.errors import UsageError
from lockstep.runtime import host_generators, randomness
from tests.data.datasets import Moody, as_list, draw_from

LIBRARIES = ["torch", "numpy", "normal", "random", "gauss"]


@pytest.fixture(autouse=True)
def _leave_states_alone() -> Iterator[None]:
    with randomness.preserved():
        yield


def expected(index: int, library: str | None) -> float:
    with randomness.preserved():
        randomness.sample(7, 3, index)
        return draw_from(library)


def everything() -> tuple[Any, ...]:
    numpy: Any = np.random.get_state()
    return torch.get_rng_state().tolist(), numpy[1].tolist(), *numpy[2:], random.getstate()


@pytest.mark.parametrize("keep", [True, False], ids=["here", "worker"])
@pytest.mark.parametrize(("first", "then"), [*product(LIBRARIES, repeat=2)])
def test_samples_that_draw_late_draw_from_their_own_stream(
    first: str, then: str, keep: bool
) -> None:
    draws_from = {2: first, 5: then, 7: first, 8: then}
    dataset = KeyedDataset(Moody(12, draws_from), 7, as_list)
    streams = Streams(keep=keep)
    for batch in ([0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10], [2, 5], [8]):
        before = everything()
        assert streams.make(lambda enter, batch=batch: dataset._batch(3, batch, enter)) == [
            (index, expected(index, draws_from.get(index))) for index in batch
        ]
        if keep:
            assert everything() == before


@pytest.mark.parametrize("library", LIBRARIES)
def test_what_the_process_has_in_store_is_neither_used_nor_lost(library: str) -> None:
    """A cached normal number is drawn without a trace in the generator's words."""
    for _ in range(4):  # an odd and an even number of normals
        np.random.standard_normal()
        random.gauss(0, 1)
        before = everything()
        dataset = KeyedDataset(Moody(4, {1: library}), 7, as_list)
        assert dataset.__getitems__((3, [1])) == [(1, expected(1, library))]
        assert dataset.__getitems__((3, [0])) == [(0, 0.0)]
        assert everything() == before


def test_a_sample_is_fetched_twice_only_where_a_library_is_first_drawn_from() -> None:
    asked: list[int] = []

    class Counting(Moody):
        def __getitem__(self, index: int) -> tuple[int, float]:
            asked.append(index)
            return super().__getitem__(index)

    dataset = KeyedDataset(
        Counting(9, {2: "torch", 3: "torch", 4: "numpy", 5: "numpy"}), 7, as_list
    )
    for index in range(6):
        dataset.__getitems__((0, [index]))
    assert asked == [0, 1, 2, 2, 3, 4, 4, 5]


def test_an_error_after_a_draw_is_the_seeded_samples_own() -> None:
    class Picky(Moody):
        def __getitem__(self, index: int) -> tuple[int, float]:
            raise KeyError(draw_from("random"))

    before = everything()
    dataset = KeyedDataset(Picky(9, {}), 7, as_list)
    for _ in range(2):
        with pytest.raises(KeyError) as caught:
            dataset.__getitems__((3, [4]))
        assert caught.value.args == (expected(4, "random"),)
    assert everything() == before


def test_the_word_of_a_python_that_cannot_be_read_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    assert host_generators._readable()
    monkeypatch.setattr(host_generators, "_readable", lambda: False)
    before = everything()
    dataset = KeyedDataset(Moody(4, {1: "random", 2: "gauss"}), 7, as_list)
    assert dataset.__getitems__((3, [0, 1, 2])) == [
        (0, 0.0),
        (1, expected(1, "random")),
        (2, expected(2, "gauss")),
    ]
    assert everything() == before


def test_another_generator_in_numpys_place_is_refused() -> None:
    old = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(1))
    try:
        with pytest.raises(
            UsageError,
            match="numpy's global generator is a PCG64, which cannot be seeded for every sample",
        ):
            KeyedDataset(Moody(4, {}), 7, as_list).__getitems__((0, [0]))
    finally:
        np.random.set_bit_generator(old)
