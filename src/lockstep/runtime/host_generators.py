"""The three generators of the host that ordinary code draws from. Looking at one, and putting it
back, costs about a microsecond.

    torch       torch's default generator
    numpy       numpy's global generator, np.random.*
    random      the functions of the module random

numpy's and `random`'s own functions for the state take 20 to 60 microseconds, so both are read and
written where they lie.
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

# of a Mersenne twister's state, 32 bits each; numpy and `random` keep the position beside them
_WORDS = 624
_BYTES = 4 * (_WORDS + 1)

# the states are read where they lie: copies of them would cost more than the rest
_memcmp: Any = ctypes.CDLL(None).memcmp
_memcmp.argtypes = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t


class Generator(Protocol):
    def look(self) -> Any:
        """The state, to compare with later and to put back."""
        ...

    def drawn(self, look: Any) -> bool:
        """Whether anything was drawn since that look."""
        ...

    def hidden(self, look: Any) -> bool:
        """Whether something could be drawn after it that `drawn` does not see."""
        ...

    def put_back(self, look: Any) -> None: ...

    def seed(self, value: int) -> None: ...


class Torch:
    """torch's default generator, of the CPU."""

    def __init__(self) -> None:
        self._generator = torch.random.default_generator

    def look(self) -> torch.Tensor:
        return self._generator.get_state()

    def drawn(self, look: torch.Tensor) -> bool:
        now = self._generator.get_state()
        # torch.equal takes three times as long
        return _differ(now.data_ptr(), look.data_ptr(), look.nbytes)

    def hidden(self, look: torch.Tensor) -> bool:
        return False

    def put_back(self, look: torch.Tensor) -> None:
        self._generator.set_state(look)

    def seed(self, value: int) -> None:
        self._generator.manual_seed(value)


# the twister's memory; whether a normal number is cached, and which
NumpyLook = tuple[bytes, int, float]


class Numpy:
    """numpy's global generator, read where its own `ctypes` interface says that it is: `get_state`
    takes forty microseconds.

    Normal numbers are made in pairs. The second is kept outside that memory and drawn without a
    trace in it; but a pair is never made without a trace, so that as long as nothing is cached a
    look shows everything.
    """

    def __init__(self) -> None:
        self._generator: Any = None
        self._memory: Any = None
        self._clean = b""  # memory last seen with nothing cached

    def look(self) -> NumpyLook:
        if self._generator is not np.random.mtrand._rand._bit_generator:
            self._find()
        memory: bytes = self._memory.raw
        if memory == self._clean:
            return memory, 0, 0.0
        state: Any = np.random.get_state()
        if not state[3]:
            self._clean = memory
        return memory, state[3], state[4]

    def drawn(self, look: NumpyLook) -> bool:
        return _differ(self._memory, look[0], _BYTES)

    def _find(self) -> None:
        generator = np.random.mtrand._rand._bit_generator
        if not isinstance(generator, np.random.MT19937):
            raise UsageError("numpy-generator-not-seedable", kind=type(generator).__name__)
        self._generator = generator  # held, so that its memory stays
        self._memory = (ctypes.c_char * _BYTES).from_address(self._generator.ctypes.state_address)
        self._clean = b""

    def hidden(self, look: NumpyLook) -> bool:
        return bool(look[1])

    def put_back(self, look: NumpyLook) -> None:
        memory, has, cached = look
        if has or self._generator is not np.random.mtrand._rand._bit_generator:
            words = np.frombuffer(memory, dtype=np.uint32)
            np.random.set_state(("MT19937", words[:_WORDS], int(words[_WORDS]), has, cached))
        else:
            np.random.seed(0)  # drops a cached normal number
            ctypes.memmove(self._memory, memory, _BYTES)

    def seed(self, value: int) -> None:
        np.random.seed(value & 0xFFFFFFFF)


class Random:
    """The module `random`, read in CPython's object: `getstate` builds a tuple of 625 numbers.

    Where that object is laid out otherwise (`_readable` tries it), it is asked for its state
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
        return _differ(self._memory, look[0], _BYTES) or self._generator.gauss_next != look[1]

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


def _differ(one: Any, other: Any, size: int) -> bool:
    return bool(_memcmp(one, other, size))


def _memory_of(generator: random.Random) -> Any:
    return (ctypes.c_char * _BYTES).from_address(id(generator) + object.__basicsize__)


@cache
def _readable() -> bool:
    """Whether a generator's position and words lie where CPython puts them."""
    if (
        sys.implementation.name != "cpython"
        or random.Random.__basicsize__ < object.__basicsize__ + _BYTES
    ):
        return False
    trial = random.Random(1)
    trial.random()
    *words, place = trial.getstate()[1]
    return bool(np.frombuffer(_memory_of(trial).raw, dtype=np.uint32).tolist() == [place, *words])
