"""The three random generators of the host that ordinary code draws from. Reading or restoring the
state of one costs a fraction of a microsecond.

    torch       torch's default generator
    numpy       numpy's global generator, np.random.*
    random      the functions of the module random

The libraries' own functions for the state take 1 to 60 microseconds. So this module reads and
writes all three states directly in memory.
"""

from __future__ import annotations

import ctypes
import random
import sys
from functools import cache
from typing import Any, Protocol

import numpy as np
import torch

from lockstep.errors import UsageError

# words of a Mersenne twister's state, 32 bits each; numpy and `random` keep the position beside
# them
_WORDS = 624
_BYTES = 4 * (_WORDS + 1)
# bytes: torch keeps seed, position and flags before the words, and two cached normal numbers behind
_BEFORE, _BEHIND = 20, 28


class Generator(Protocol):
    def look(self) -> Any:
        """Return the state, to compare it later and to restore it."""
        ...

    def drawn(self, look: Any) -> bool:
        """Whether anything was drawn since `look` was taken."""
        ...

    def hidden(self, look: Any) -> bool:
        """Whether `drawn` could miss a draw that follows `look`."""
        ...

    def put_back(self, look: Any) -> None: ...

    def seed(self, value: int) -> None: ...


class Torch:
    """torch's default CPU generator, read in the memory of torch's object. If `_place_in_torch`
    finds another memory layout, torch's own functions read and set the state instead.
    """

    def __init__(self) -> None:
        self._generator = torch.random.default_generator
        place = _place_in_torch()
        self._memory = None if place is None else _torch_memory(self._generator, place)

    def look(self) -> Any:
        return self._generator.get_state() if self._memory is None else self._memory.raw

    def drawn(self, look: Any) -> bool:
        if self._memory is None:
            return not torch.equal(self._generator.get_state(), look)
        return bool(self._memory.raw != look)

    def hidden(self, look: Any) -> bool:
        return False

    def put_back(self, look: Any) -> None:
        if self._memory is None:
            self._generator.set_state(look)
        else:
            ctypes.memmove(self._memory, look, len(look))

    def seed(self, value: int) -> None:
        self._generator.manual_seed(value)


# (the twister's memory, whether a normal number is cached, the cached number)
NumpyLook = tuple[bytes, int, float]


class Numpy:
    """numpy's global generator, read at the address that its own `ctypes` interface gives:
    `get_state` takes forty microseconds.

    numpy makes normal numbers in pairs, and caches the second outside that memory. Drawing the
    cached number leaves no trace in the memory, but making a pair does. So while nothing is cached,
    a look shows every draw.
    """

    def __init__(self) -> None:
        self._generator: Any = None
        self._memory: Any = None
        # the memory when it was last seen with nothing cached, and right after the last seed
        self._clean = self._seeded = b""

    def look(self) -> NumpyLook:
        if self._generator is not np.random.mtrand._rand._bit_generator:
            self._find()
        memory: bytes = self._memory.raw
        if memory in (self._clean, self._seeded):
            return memory, 0, 0.0
        state: Any = np.random.get_state()
        if not state[3]:
            self._clean = memory
        return memory, state[3], state[4]

    def drawn(self, look: NumpyLook) -> bool:
        return bool(self._memory.raw != look[0])

    def _find(self) -> None:
        generator = np.random.mtrand._rand._bit_generator
        if not isinstance(generator, np.random.MT19937):
            raise UsageError("numpy-generator-not-seedable", kind=type(generator).__name__)
        self._generator = generator  # keeps the generator's memory alive
        self._memory = (ctypes.c_char * _BYTES).from_address(self._generator.ctypes.state_address)
        self._clean = self._seeded = b""

    def hidden(self, look: NumpyLook) -> bool:
        return bool(look[1])

    def put_back(self, look: NumpyLook) -> None:
        memory, has, cached = look
        if has or self._generator is not np.random.mtrand._rand._bit_generator:
            words = np.frombuffer(memory, dtype=np.uint32)
            np.random.set_state(("MT19937", words[:_WORDS], int(words[_WORDS]), has, cached))
        else:
            if self._memory.raw not in (self._clean, self._seeded):
                np.random.seed(0)  # drops a cached normal number
            ctypes.memmove(self._memory, memory, _BYTES)

    def seed(self, value: int) -> None:
        np.random.seed(value & 0xFFFFFFFF)
        if self._generator is not np.random.mtrand._rand._bit_generator:
            self._find()
        self._seeded = self._memory.raw


class Random:
    """The generator of the module `random`, read in the memory of CPython's object: `getstate`
    builds a tuple of 625 numbers.

    If `_readable` finds another memory layout, the module's own functions read and set the state
    instead.
    """

    def __init__(self) -> None:
        self._generator: Any = random._inst
        self._memory = _memory_of(self._generator) if _readable() else None

    def look(self) -> tuple[Any, Any]:
        if self._memory is None:
            return random.getstate(), None
        return self._memory.raw, self._generator.gauss_next

    def drawn(self, look: tuple[Any, Any]) -> bool:
        if self._memory is None:
            return bool(random.getstate() != look[0])
        return bool(self._memory.raw != look[0] or self._generator.gauss_next != look[1])

    def hidden(self, look: Any) -> bool:
        return False

    def put_back(self, look: tuple[Any, Any]) -> None:
        state, gauss = look
        if self._memory is None:
            random.setstate(state)
        else:
            ctypes.memmove(self._memory, state, _BYTES)
            self._generator.gauss_next = gauss

    def seed(self, value: int) -> None:
        random.seed(value)


def _torch_memory(generator: Any, place: int) -> Any:
    size = _BEFORE + 4 * _WORDS + _BEHIND
    return (ctypes.c_char * size).from_address(generator._cdata + place)


@cache
def _place_in_torch() -> int | None:
    """Return the offset of a generator's state in torch's object; None if it cannot be read there.
    The offset is found with a generator of known words, and then tested.
    """
    trial = torch.Generator("cpu")
    trial.manual_seed(1)
    torch.rand(3, generator=trial, device="cpu")  # whatever the default device is
    words = trial.get_state().view(torch.int64)[3 : _WORDS - 20].to(torch.int32).numpy().tobytes()
    place: int = _torch_memory(trial, 0).raw.find(words) - _BEFORE
    if place < 0:
        return None
    memory = _torch_memory(trial, place)
    for _ in range(2):  # twice: the second normal number leaves no trace in the words
        look, state = memory.raw, trial.get_state()
        torch.randn(1, generator=trial, device="cpu")
        drawn = memory.raw
        ctypes.memmove(memory, look, len(look))
        if drawn == look or not torch.equal(trial.get_state(), state):
            return None
        torch.randn(1, generator=trial, device="cpu")
    return place


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
    *words, place = trial.getstate()[1]
    return bool(np.frombuffer(_memory_of(trial).raw, dtype=np.uint32).tolist() == [place, *words])
