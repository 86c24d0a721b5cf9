"""A look at a generator shows whether something was drawn, and puts all of its state back."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from lockstep.runtime import randomness
from lockstep.runtime.randomness import HostGenerators
from tests.data.datasets import draw_from


@pytest.fixture(autouse=True)
def leave_states_alone() -> Iterator[None]:
    with randomness.preserved():
        yield


def everything() -> tuple[Any, ...]:
    """The states of all generators of this process."""
    state: Any = np.random.get_state()
    return torch.get_rng_state().tolist(), state[1].tolist(), *state[2:], random.getstate()


@pytest.mark.parametrize("draw", ["torch", "numpy", "normal", "random", "gauss"])
def test_a_draw_is_seen_and_the_states_are_restored(draw: str) -> None:
    generators = HostGenerators()
    generators.seed(5)
    library = {"normal": "numpy", "gauss": "random"}.get(draw, draw)
    for count in (1, 623, 1, 624, 1248):
        state, before = generators.get_state(), everything()
        assert generators.drawn(state) == []
        for _ in range(count):
            draw_from(draw)
        assert generators.drawn(state) == [library]
        generators.set_state(state)
        assert everything() == before


@pytest.mark.parametrize("draw", ["torch-normal", "normal", "gauss"])
@pytest.mark.parametrize("stored", [0, 1])
def test_a_cached_normal_number_is_restored_and_no_other_is_left(draw: str, stored: int) -> None:
    generators = HostGenerators()
    generators.seed(5)
    for _ in range(stored):
        draw_from(draw)
    state, before = generators.get_state(), everything()
    for count in (1, 2):
        generators.seed(6)
        for _ in range(count):
            draw_from(draw)
        generators.set_state(state)
        assert everything() == before


def test_only_the_named_generators_are_seeded_and_restored() -> None:
    generators = HostGenerators()
    generators.seed(5)
    before = everything()
    state = generators.get_state()
    generators.seed(6, ["numpy"])
    assert generators.drawn(state) == ["numpy"]
    draw_from("random")
    generators.set_state(state, ["numpy"])
    assert generators.drawn(state) == ["random"]
    generators.set_state(state, ["random"])
    assert everything() == before
