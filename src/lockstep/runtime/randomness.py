"""Keyed randomness: each random stream belongs to its purpose, never to the rank or process that
draws from it.

    shared stream       (seed)                  initialisation: equal on all ranks
    step stream         (seed, step, slot)      dropout: belongs to the micro-batch
    update stream       (seed, step)            an optimizer that draws: equal on all ranks
    sample stream       (seed, epoch, index)    augmentation: belongs to the sample
    collate stream      (seed, epoch, index)    masking, mixing: belongs to the micro-batch that
                                                begins with this sample

To enter a stream, torch, numpy and `random` are seeded with a number derived from the key, so
ordinary code draws from it. Adding the rank to a seed instead makes collisions (seed 0 rank 1 =
seed 1 rank 0) and ties the training to the number of ranks. What cannot be keyed: generators that
seed themselves from the operating system, such as `numpy.random.default_rng()` without a seed.

Plain scripts use one seed for all ranks, and blocks that draw from their own stream:

    lockstep.seed(0)                            # the model is built equal on all ranks
    model = Net()
    with lockstep.stream("rank"):               # on purpose different on every rank
        noise = torch.randn(8)
    with lockstep.stream("sample", epoch, 17):  # in this epoch the same on any rank that draws it
        image = augment(image)
"""

from __future__ import annotations

import ctypes
import math
import random
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray


from lockstep.config.knob import chosen, whole
from lockstep.errors import UsageError
from lockstep.runtime.environment import rank_and_size

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio
# splitmix64's factors
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB
# every recorded run depends on these: add numbers, never renumber
_SHARED, _STEP, _SAMPLE, _COLLATE, _ORDER, _SAMPLER, _COMPONENT = range(1, 8)
_RANK = 16
WITNESS = 17
"""Key for the choice of the steps to compute again, and of the ranks that do it. It is no stream.
"""
_UPDATE = 2**62  # stands where other keys have a slot
NAMES = ("torch", "numpy", "random")
# words of a Mersenne twister's state, 32 bits each; numpy and `random` store the position beside
# them
_WORDS = 624
_BYTES = 4 * (_WORDS + 1)


def derive(seed: int, *key: int) -> int:
    """Return a 64-bit number from a seed and a key. It is equal for equal keys on every machine,
    and unrelated for different keys.

    Each number is mixed in by splitmix64's finaliser (Steele, Lea and Flood, OOPSLA 2014). Numbers
    count modulo 2^64. Not for secrets.
    """
    state = _mix(seed & _MASK)
    for number in key:
        state = _extend(state, number)
    return state


# every sample of an epoch begins with the same three numbers, and every micro-batch of a step
_prefix = lru_cache(maxsize=64)(derive)


def _extend(state: int, number: int) -> int:
    """Return `_mix(state ^ _mix(number + golden))`, without calls: every sample needs one."""
    value = number + _GOLDEN
    for other in (state, 0):
        value = (value + _GOLDEN) & _MASK
        value = ((value ^ (value >> 30)) * _FIRST) & _MASK
        value = ((value ^ (value >> 27)) * _SECOND) & _MASK
        value ^= (value >> 31) ^ other
    return value


def _mix(value: int) -> int:
    value = (value + _GOLDEN) & _MASK
    value = ((value ^ (value >> 30)) * _FIRST) & _MASK
    value = ((value ^ (value >> 27)) * _SECOND) & _MASK
    return value ^ (value >> 31)


def seed_all(value: int) -> None:
    """Seed torch (its accelerators too), numpy's global generator (with 32 of the bits) and
    `random`.
    """
    host_generators().seed(value & _MASK)
    if _has_accelerator():
        import torch

        # without an accelerator torch.manual_seed wastes time: it formats a stack trace for a later
        # GPU
        torch.manual_seed(value & _MASK)


@cache
def _has_accelerator() -> bool:
    import torch

    return torch.accelerator.is_available()


def shared(seed: int) -> None:
    """Enter the shared stream: the next draws are equal on all ranks."""
    seed_all(derive(seed, _SHARED))


def step(seed: int, step: int, slot: int) -> None:
    """Enter the stream of one micro-batch's forward."""
    key = _extend(_prefix(seed, _STEP, step), slot)
    if _has_accelerator():
        seed_all(key)
    else:  # one call less: every micro-batch comes here
        host_generators().seed(key)


@contextmanager
def update(seed: int, number: int) -> Iterator[None]:
    """Run a step's update in a stream of its own. It is equal on all ranks, and for any number of
    ranks. The block does not change what the process draws after it.
    """
    before = get_state()
    step(seed, number, _UPDATE)
    try:
        yield
    finally:
        set_state(before)


def sample(seed: int, epoch: int, index: int) -> None:
    """Enter the stream of one sample in one epoch. It seeds the CPU only: loading a sample must not
    disturb the GPU's draws for the model.
    """
    host_generators().seed(sample_key(seed, epoch, index))


def collate(seed: int, epoch: int, index: int) -> None:
    """Enter the stream in which samples are collated to the micro-batch whose first sample is
    `index`. It seeds the CPU only.
    """
    host_generators().seed(collate_key(seed, epoch, index))


def sample_key(seed: int, epoch: int, index: int) -> int:
    """Return the number that `sample` seeds with. Nothing is seeded."""
    return _extend(_prefix(seed, _SAMPLE, epoch), index)


def collate_key(seed: int, epoch: int, index: int) -> int:
    """Return the number that `collate` seeds with. Nothing is seeded."""
    return derive(seed, _COLLATE, epoch, index)


def rank(seed: int, rank: int, *key: int) -> None:
    """Enter a stream that belongs to a rank: for draws that shall differ between ranks and may
    change with the world size.
    """
    seed_all(derive(seed, _RANK, rank, *key))


def order(seed: int, epoch: int) -> int:
    """Return the key of an epoch's order. It is a number, not a stream: nothing is seeded."""
    return derive(seed, _ORDER, epoch)


class RandomState(NamedTuple):
    """The random states of this process."""

    host: HostState
    devices: Sequence[torch.Tensor]
    """Those of the GPUs, if they were asked for and this process has used one."""


def get_state(*, devices: bool = True) -> RandomState:
    """Return the states of torch's CPU generator, numpy's global generator and `random`, and with
    `devices` of the GPUs.
    """
    import torch

    states = []
    if devices and torch.cuda.is_initialized():
        states = [generator.get_state() for generator in torch.cuda.default_generators]
    return RandomState(host_generators().get_state(), states)


def set_state(state: RandomState) -> None:
    """Restore what `get_state` returned."""
    host_generators().set_state(state.host)
    if state.devices:
        import torch

        for generator, device_state in zip(
            torch.cuda.default_generators, state.devices, strict=True
        ):
            generator.set_state(device_state)


@contextmanager
def preserved(*, devices: bool = False) -> Iterator[None]:
    """Restore the CPU states of torch, numpy's global generator and `random` after the block, also
    when it raises. With `devices`, restore the GPUs' states too.
    """
    before = get_state(devices=devices)
    try:
        yield
    finally:
        set_state(before)


def sampler(seed: int, epoch: int) -> int:
    """Enter the stream in which a user's sampler draws an epoch, on the CPU. Return the number that
    it is seeded with.
    """
    key = derive(seed, _SAMPLER, epoch)
    host_generators().seed(key)
    return key


def component_key(seed: int, component: int, cycle: int) -> int:
    """Return the key of a mixture component's order in the `cycle`-th pass over it. Nothing is
    seeded.
    """
    return derive(seed, _COMPONENT, component, cycle)


def uniforms(key: int, numbers: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return a uniform number in the open interval (0, 1) for each of `numbers`: float64 with 52
    random bits, same shape. It is `derive(key, number)`, scaled.
    """
    import numpy as np

    golden = np.uint64(_GOLDEN)
    mixed = numbers.astype(np.uint64) + golden
    for start in (np.uint64(0), np.uint64(_mix(key & _MASK))):
        mixed = (mixed ^ start) + golden
        for shift, factor in ((30, _FIRST), (27, _SECOND)):
            mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
        mixed ^= mixed >> np.uint64(31)
    return ((mixed >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52


# -- the generators of the host -------------------------------------------------------------------
# numpy's and Python's own functions for the state take 20 to 70 microseconds, and a step asks several
# times. So the states of these two are read and written in memory: numpy's at the address that its
# `ctypes` interface gives, Python's where a trial has found it.


class HostState(NamedTuple):
    """The states of the three generators."""

    torch: torch.Tensor
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
        import numpy as np
        import torch

        self._np = np
        self._equal = torch.equal
        self._torch = torch.random.default_generator
        self._random: Any = random._inst
        self._random_memory = _memory_of(self._random) if _readable() else None
        self._numpy: Any = None
        self._numpy_memory: Any = None
        # numpy's words when they were last seen with nothing cached, and right after the last seed
        self._clean = self._seeded = b""

    def get_state(self) -> HostState:
        """Return the states, to restore them or to see later whether something was drawn."""
        if self._numpy is not self._np.random.mtrand._rand._bit_generator:
            self._find_numpy()
        words: bytes = self._numpy_memory.raw
        normal: float | None = None
        if words != self._clean and words != self._seeded:
            *_, has_normal, cached = self._np.random.get_state()
            if has_normal:
                normal = float(cached)
            else:
                self._clean = words
        if self._random_memory is None:
            python = random.getstate()
            gauss = None
        else:
            python = self._random_memory.raw
            gauss = self._random.gauss_next
        return HostState(self._torch.get_state(), words, normal, python, gauss)

    def drawn(self, state: HostState) -> list[str]:
        """Return the names of the generators that were drawn from since `state` was taken. A normal
        number that numpy had cached then is not seen.
        """
        names = []
        if not self._equal(self._torch.get_state(), state.torch):
            names.append("torch")
        if self._numpy_memory.raw != state.numpy:
            names.append("numpy")
        if self._random_memory is None:
            drawn = random.getstate() != state.random
        else:
            drawn = (
                self._random_memory.raw != state.random or self._random.gauss_next != state.gauss
            )
        if drawn:
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
        replaced = self._numpy is not self._np.random.mtrand._rand._bit_generator
        if replaced or state.normal is not None:
            *words, position = self._np.frombuffer(state.numpy, dtype=self._np.uint32).tolist()
            has_normal = int(state.normal is not None)
            self._np.random.set_state(("MT19937", words, position, has_normal, state.normal or 0.0))
            return
        words_now = self._numpy_memory.raw
        if words_now != self._clean and words_now != self._seeded:
            self._np.random.seed(0)  # drops a cached normal number
        ctypes.memmove(self._numpy_memory, state.numpy, _BYTES)

    def seed(self, value: int, names: Collection[str] = NAMES) -> None:
        """Seed these generators with a number of 64 bits (numpy with 32 of them)."""
        if "torch" in names:
            self._torch.manual_seed(value)
        if "numpy" in names:
            self._np.random.seed(value & 0xFFFFFFFF)
            if self._numpy is not self._np.random.mtrand._rand._bit_generator:
                self._find_numpy()
            self._seeded = self._numpy_memory.raw
        if "random" in names:
            random.seed(value)

    def _find_numpy(self) -> None:
        generator = self._np.random.mtrand._rand._bit_generator
        if not isinstance(generator, self._np.random.MT19937):
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
    import numpy as np

    trial = random.Random(1)
    trial.random()
    *words, position = trial.getstate()[1]
    memory = np.frombuffer(_memory_of(trial).raw, dtype=np.uint32)
    return bool(memory.tolist() == [position, *words])


# -- plain scripts --------------------------------------------------------------------------------

Kind = Literal["rank", "step", "sample"]
_KEYS = {
    "rank": "any whole numbers",
    "step": "step and, if you like, slot",
    "sample": "epoch and index",
}
_LENGTHS: dict[str, range] = {"rank": range(100), "step": range(1, 3), "sample": range(2, 3)}
_seed: int | None = None


def seed(seed: int) -> None:
    """Seed torch (GPUs too), numpy's global generator and `random` with the same number on all
    ranks.

    `stream` draws from streams of this seed.

    Example::

        lockstep.seed(0)
        model = Net()  # equal on all ranks

    Args:
        seed: any whole number.

    Raises:
        UsageError: not a whole number.
    """
    global _seed
    number = whole("seed", seed, -math.inf)
    shared(number)
    _seed = number


@contextmanager
def stream(kind: Kind, *key: int) -> Iterator[None]:
    """Draw from a random stream of its own within the block.

    Afterwards the random states are what they were before, also when the block raises.

    Example::

        with lockstep.stream("rank"):  # different on every rank
            noise = torch.randn(8)
        with lockstep.stream("sample", epoch, 17):  # the same on any rank, in this epoch
            image = augment(image)

    Args:
        kind: "rank": another stream on every rank. "step": the stream of a micro-batch's forward,
            as a Stepper with this seed enters it. "sample": the stream of one sample in one epoch,
            as a Loader with this seed enters it (torch's CPU generator, numpy, `random`).
        key: numbers that choose the stream. "rank" takes any, "step" takes the step and the slot
            (default 0), "sample" takes the epoch and the sample's index.

    Raises:
        UsageError: `lockstep.seed` was not called, an unknown kind, or a key of the wrong length.
    """
    if _seed is None:
        raise UsageError("seed-not-set")
    chosen("kind", kind, _KEYS)
    numbers = [whole("key", number, -math.inf) for number in key]
    if len(numbers) not in _LENGTHS[kind]:
        raise UsageError("stream-key-wrong", kind=kind, key=list(key), expected=_KEYS[kind])
    with preserved(devices=kind != "sample"):
        if kind == "rank":
            rank(_seed, rank_and_size()[0], *numbers)
        elif kind == "step":
            step(_seed, numbers[0], numbers[1] if len(numbers) > 1 else 0)
        else:
            sample(_seed, numbers[0], numbers[1])
        yield
