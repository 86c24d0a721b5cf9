"""A look at a generator shows whether something was drawn, and puts all of its state back."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from lockstep.runtime import randomness
from lockstep.runtime.host_generators import Numpy, Random, Torch, _place_in_torch
from tests.data.datasets import draw_from


@pytest.fixture(autouse=True)
def leave_states_alone() -> Iterator[None]:
    with randomness.preserved():
        yield


def everything() -> tuple[Any, ...]:
    """The states of all generators of this process."""
    state: Any = np.random.get_state()
    return torch.get_rng_state().tolist(), state[1].tolist(), *state[2:], random.getstate()


@pytest.mark.parametrize(
    ("kind", "draw"),
    [(Torch, "torch"), (Numpy, "numpy"), (Numpy, "normal"), (Random, "random"), (Random, "gauss")],
)
def test_a_look_shows_a_draw_and_puts_the_state_back(kind: Any, draw: str) -> None:
    generator = kind()
    generator.seed(5)
    for count in (1, 623, 1, 624, 1248):
        look, before = generator.look(), everything()
        assert not generator.drawn(look)
        for _ in range(count):
            draw_from(draw)
        assert generator.drawn(look)
        generator.put_back(look)
        assert everything() == before


@pytest.mark.parametrize("kind", [Torch, Numpy, Random])
@pytest.mark.parametrize("stored", [0, 1])
def test_a_normal_number_in_store_is_put_back_and_no_other_is_left(kind: Any, stored: int) -> None:
    generator, draw = kind(), {Torch: "torch-normal", Numpy: "normal", Random: "gauss"}[kind]
    generator.seed(5)
    for _ in range(stored):
        draw_from(draw)
    look, before = generator.look(), everything()
    for count in (1, 2):
        generator.seed(6)
        for _ in range(count):
            draw_from(draw)
        generator.put_back(look)
        assert everything() == before


def test_torchs_generator_is_found_under_any_default_device() -> None:
    find = _place_in_torch.__wrapped__  # what the process has found is left alone
    with torch.device("cpu"):
        expected = find()
    with torch.device("meta"):
        assert find() == expected
