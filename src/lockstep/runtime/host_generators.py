"""The three random generators of the host that ordinary code draws from: torch's default generator,
numpy's global generator (np.random.*), and the functions of the module random.

numpy's and Python's own functions for the state take 20 to 70 microseconds, and a step asks several
times. So the states of these two are read and written in memory: numpy's at the address that its
`ctypes` interface gives, Python's where a trial has found it.
"""

from __future__ import annotations

import ctypes
import random
import sys
from collections.abc import Collection
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lockstep.errors import UsageError

NAMES = ("torch", "numpy", "random")
# words of a Mersenne twister's state, 32 bits each; numpy and `random` store the position beside
# them
_WORDS = 624
_BYTES = 4 * (_WORDS + 1)


class HostState(NamedTuple):
    """The states of the three generators."""

    torch: Tensor
    numpy: bytes
    """The words and the position of the twister."""
    normal: float | None
    """The normal number that numpy has cached, if any: it makes them in pairs. Drawing it leaves no
    trace in the words, while making a pair does.
    """
    random: Any
    """The words and the position; where they cannot be read, what `random.getstate` returns."""
    gauss: float | None
    """The normal number that `random` has cached."""


class HostGenerators:
    """The generators of this process."""

    def __init__(self) -> None:
        self._torch = torch.random.default_generator
        self._random: Any = random._inst
        self._random_memory = _memory_of(self._random) if _readable() else None
        self._numpy: Any = None
        self._numpy_memory: Any = None
        # numpy's words when they were last seen with nothing cached, and right after the last seed
        self._clean = self._seeded = b""

    def get_state(self) -> HostState:
        """Return the states, to restore them or to see later whether something was drawn."""
        if self._numpy is not np.random.mtrand._rand._bit_generator:
            self._find_numpy()
        words: bytes = self._numpy_memory.raw
        normal: float | None = None
        if words != self._clean and words != self._seeded:
            *_, has_normal, cached = np.random.get_state()
            if has_normal:
                normal = float(cached)
            else:
                self._clean = words
        if self._random_memory is None:
            return HostState(self._torch.get_state(), words, normal, random.getstate(), None)
        return HostState(
            self._torch.get_state(),
            words,
            normal,
            self._random_memory.raw,
            self._random.gauss_next,
        )

    def drawn(self, state: HostState) -> list[str]:
        """Return the names of the generators that were drawn from since `state` was taken. A normal
        number that numpy had cached then is not seen.
        """
        names = []
        if not torch.equal(self._torch.get_state(), state.torch):
            names.append("torch")
        if self._numpy_memory.raw != state.numpy:
            names.append("numpy")
        if self._random_memory is None:
            if random.getstate() != state.random:
                names.append("random")
        elif self._random_memory.raw != state.random or self._random.gauss_next != state.gauss:
            names.append("random")
        return names

    def set_state(self, state: HostState, names: Collection[str] = NAMES) -> None:
        """Restore the states of these generators."""
        if "torch" in names:
            self._torch.set_state(state.torch)
        if "numpy" in names:
            self._set_numpy(state)
        if "random" in names:
            if self._random_memory is None:
                random.setstate(state.random)
            else:
                ctypes.memmove(self._random_memory, state.random, _BYTES)
                self._random.gauss_next = state.gauss

    def _set_numpy(self, state: HostState) -> None:
        if state.normal is not None or self._numpy is not np.random.mtrand._rand._bit_generator:
            *words, position = np.frombuffer(state.numpy, dtype=np.uint32).tolist()
            has_normal = int(state.normal is not None)
            np.random.set_state(("MT19937", words, position, has_normal, state.normal or 0.0))
            return
        words_now = self._numpy_memory.raw
        if words_now != self._clean and words_now != self._seeded:
            np.random.seed(0)  # drops a cached normal number
        ctypes.memmove(self._numpy_memory, state.numpy, _BYTES)

    def seed(self, value: int, names: Collection[str] = NAMES) -> None:
        """Seed these generators with a number of 64 bits (numpy with 32 of them)."""
        if "torch" in names:
            self._torch.manual_seed(value)
        if "numpy" in names:
            np.random.seed(value & 0xFFFFFFFF)
            if self._numpy is not np.random.mtrand._rand._bit_generator:
                self._find_numpy()
            self._seeded = self._numpy_memory.raw
        if "random" in names:
            random.seed(value)

    def _find_numpy(self) -> None:
        generator = np.random.mtrand._rand._bit_generator
        if not isinstance(generator, np.random.MT19937):
            raise UsageError("numpy-generator-not-seedable", kind=type(generator).__name__)
        self._numpy = generator  # keeps the generator's memory alive
        self._numpy_memory = (ctypes.c_char * _BYTES).from_address(generator.ctypes.state_address)
        self._clean = self._seeded = b""


@cache
def host_generators() -> HostGenerators:
    """Return the one object of this process."""
    return HostGenerators()


def _memory_of(generator: random.Random) -> Any:
    return (ctypes.c_char * _BYTES).from_address(id(generator) + object.__basicsize__)


@cache
def _readable() -> bool:
    """Whether a generator's position and words are where CPython stores them."""
    if (
        sys.implementation.name != "cpython"
        or random.Random.__basicsize__ < object.__basicsize__ + _BYTES
    ):
        return False
    trial = random.Random(1)
    trial.random()
    *words, position = trial.getstate()[1]
    memory = np.frombuffer(_memory_of(trial).raw, dtype=np.uint32)
    return bool(memory.tolist() == [position, *words])
