"""What is random in a data set belongs to (seed, epoch, index): not to a process, an order or a
neighbour.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import StackDataset, Subset

from lockstep.data import keyed
from lockstep.data.keyed import KeyedDataset, Streams, fetches_at_once
from lockstep.errors import UsageError
from lockstep.runtime import randomness
from tests.data.datasets import AtOnce, Augmented, Moody, Numbers, as_list, draw_from, with_draws


def fetched(dataset: KeyedDataset, *keys: tuple[int, int]) -> Any:
    """`keys` are (epoch, index), all of one epoch."""
    return dataset.__getitems__((keys[0][0], [index for _, index in keys]))


def drawn(dataset: KeyedDataset, *keys: tuple[int, int]) -> list[tuple[float, ...]]:
    return [tuple(values.tolist()) for _, values in fetched(dataset, *keys)]


@pytest.mark.parametrize("data", [Augmented(9), Subset(Augmented(12), range(3, 12))])
def test_a_samples_draws_do_not_depend_on_its_neighbours(data: Any) -> None:
    dataset = KeyedDataset(data, 3, as_list)
    together = drawn(dataset, (0, 4), (0, 5), (0, 6))
    assert drawn(dataset, (0, 6), (0, 5)) == [together[2], together[1]]
    assert drawn(dataset, (0, 4)) == together[:1]


def test_samples_epochs_and_seeds_draw_differently_from_every_library() -> None:
    rows = []
    for seed, epoch, index in product((0, 1), repeat=3):
        rows += drawn(KeyedDataset(Augmented(9), seed, as_list), (epoch, index))
    for library in range(3):
        assert len({row[library] for row in rows}) == 8


def test_a_collate_function_draws_from_the_batchs_own_stream() -> None:
    before = everything()
    dataset = KeyedDataset(Numbers(9), 0, with_draws)
    first = fetched(dataset, (0, 1), (0, 2))[1]
    assert torch.equal(fetched(dataset, (0, 1), (0, 2))[1], first)
    assert torch.equal(fetched(dataset, (0, 1), (0, 5))[1], first)
    assert torch.equal(fetched(KeyedDataset(Augmented(9), 0, with_draws), (0, 1), (0, 2))[1], first)
    others = [fetched(dataset, key, (0, 3))[1] for key in ((0, 2), (1, 1))]
    others += [fetched(KeyedDataset(Numbers(9), 1, with_draws), (0, 1), (0, 2))[1]]
    # nor is it the sample's stream
    others += [fetched(KeyedDataset(Augmented(9), 0, as_list), (0, 1))[0][1]]
    assert all((first != other).all() for other in others)
    assert everything() == before


def test_a_data_set_that_fetches_at_once_is_asked_once() -> None:
    dataset = KeyedDataset(AtOnce(9), 0, as_list)
    batch = fetched(dataset, (2, 4), (2, 1))
    assert [index for index, _ in batch] == [4, 1]
    assert drawn(dataset, (2, 4), (2, 1)) == [tuple(values.tolist()) for _, values in batch]
    assert drawn(dataset, (3, 4), (3, 1)) != drawn(dataset, (2, 4), (2, 1))


def test_torchs_wrappers_are_looked_through() -> None:
    plain, at_once = Augmented(9), AtOnce(9)
    for one_by_one in (plain, Subset(Subset(plain, [1, 2]), [0]), StackDataset(x=plain)):
        assert not fetches_at_once(one_by_one)
    for together in (at_once, Subset(at_once, [1, 2]), StackDataset(plain, at_once)):
        assert fetches_at_once(together)


# -- whether a data set draws ----------------------------------------------------------------------


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


@pytest.mark.parametrize(("first", "then"), [*product(LIBRARIES, repeat=2)])
def test_samples_that_draw_late_draw_from_their_own_stream(first: str, then: str) -> None:
    draws_from = {2: first, 5: then, 7: first, 8: then}
    dataset = KeyedDataset(Moody(12, draws_from), 7, as_list)
    streams = Streams()
    for batch in ([0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10], [2, 5], [8]):
        before = everything()
        assert streams.make(
            lambda enter, batch=batch: dataset._batch(3, batch, as_list, enter)
        ) == [(index, expected(index, draws_from.get(index))) for index in batch]
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


def test_an_iterator_that_ends_inside_a_sample_is_an_error_and_no_shorter_batch() -> None:
    class Ended(Moody):
        def __getitem__(self, index: int) -> tuple[int, float]:
            return index, next(iter([0.5] * (index < 2)))

    dataset = KeyedDataset(Ended(4, {}), 7, as_list)
    assert dataset.__getitems__((3, [0, 1])) == [(0, 0.5), (1, 0.5)]
    with pytest.raises(StopIteration) as caught:
        dataset.__getitems__((3, [0, 1, 2, 3]))
    assert "This was sample 2 of Ended" in caught.value.__notes__[0]


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
    assert randomness._readable()
    monkeypatch.setattr(randomness, "_readable", lambda: False)
    unread = randomness.HostGenerators()
    monkeypatch.setattr(keyed, "host_generators", lambda: unread)
    before = everything()
    draws_from = {1: "random", 2: "gauss"}
    dataset = KeyedDataset(Moody(4, draws_from), 7, as_list)
    batch = dataset.__getitems__((3, [0, 1, 2]))
    assert batch == [(index, expected(index, draws_from.get(index))) for index in range(3)]
    assert everything() == before


def test_another_generator_in_numpys_place_is_refused() -> None:
    old = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(1))
    try:
        with pytest.raises(UsageError, match="numpy's global generator is a PCG64"):
            KeyedDataset(Moody(4, {}), 7, as_list).__getitems__((0, [0]))
    finally:
        np.random.set_bit_generator(old)
