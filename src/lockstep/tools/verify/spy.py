"""Record the user's calls that can make runs differ, with their lines: calls that read the clock,
the rank or the process, or that draw from another random generator.

Python reports every function call to a profiler. Only calls from the user's own code count, because
torch reads the clock too.
"""

from __future__ import annotations

import datetime
import gc
import os
import random
import sys
import sysconfig
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import lockstep
from lockstep.tools.verify.trace import digest_of

CLOCK, ENTROPY, PROCESS, RANK = "clock", "entropy", "process", "rank"
SIZE, THREADS, SEED, OWN = "size", "threads", "seed", "own"
"""What a call reads. SEED: it seeds a generator that Lockstep seeds itself. OWN: it draws from
another generator.
"""

_VARIABLES = {
    "RANK": RANK,
    "LOCAL_RANK": RANK,
    "GROUP_RANK": RANK,
    "WORLD_SIZE": SIZE,
    "LOCAL_WORLD_SIZE": SIZE,
}
_NUMPY = {"seed": SEED, "default_rng": OWN}  # numpy's own functions are not reported to a profiler
_CLOCKS = ("time", "time_ns", "monotonic", "monotonic_ns", "perf_counter")
_STDLIB = sysconfig.get_path("stdlib")
_PACKAGES = tuple(
    str(Path(str(module.__file__)).parent) + os.sep for module in (lockstep, torch, np)
)
_BUILTINS: dict[Any, tuple[str, str]] = {
    **{getattr(time, name): (CLOCK, f"time.{name}()") for name in _CLOCKS},
    os.getpid: (PROCESS, "os.getpid()"),
    os.urandom: (ENTROPY, "os.urandom()"),
    hash: (PROCESS, "hash()"),
    id: (PROCESS, "id()"),
    torch.get_num_threads: (THREADS, "torch.get_num_threads()"),
}
_FUNCTIONS: dict[Any, tuple[str, str]] = {
    torch.manual_seed.__code__: (SEED, "torch.manual_seed()"),
    torch.seed.__code__: (SEED, "torch.seed()"),
    dist.get_rank.__code__: (RANK, "torch.distributed.get_rank()"),
    dist.get_world_size.__code__: (SIZE, "torch.distributed.get_world_size()"),
    random.SystemRandom.random.__code__: (ENTROPY, "random.SystemRandom"),
}


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """A recorded call: its kind, its name and the line of the caller."""

    kind: str
    name: str
    line: str
    """file.py, line 12"""

    def __str__(self) -> str:
        return f"{self.name} ({self.line})"


@dataclass(slots=True)
class Seen:
    """The recorded calls of one run of a block."""

    calls: list[RecordedCall] = field(default_factory=list)
    moved: list[str] = field(default_factory=list)
    """The kinds of the user's own generators whose state changed."""

    def of(self, kind: str) -> list[RecordedCall]:
        return [call for call in self.calls if call.kind == kind]


@contextmanager
def watching() -> Iterator[Seen]:
    """Record what the block calls in this thread, and which generators it draws from."""
    seen = Seen()
    generators = _generators()
    states = [_state(generator) for generator in generators]
    profiler = sys.getprofile()
    with _numpy(seen):
        sys.setprofile(partial(_record, seen))
        try:
            yield seen
        finally:
            sys.setprofile(profiler)
    for generator, state in zip(generators, states, strict=True):
        if _state(generator) != state and _kind(generator) not in seen.moved:
            seen.moved.append(_kind(generator))


def _kind(generator: Any) -> str:
    library = "numpy.random"
    if isinstance(generator, torch.Generator):
        library = "torch"
    elif isinstance(generator, random.Random):
        library = "random"
    return f"{library}.{type(generator).__name__}"


def _record(seen: Seen, frame: FrameType, event: str, argument: Any) -> None:
    """Record a call by the user, as a profiler of Python reports it."""
    caller: FrameType | None = frame
    if event == "c_call":
        kind_and_name = _builtin(argument)
    elif event == "call":
        kind_and_name = _function(frame)
        caller = frame.f_back
    else:
        return
    if kind_and_name is None:
        return
    line = _line(caller)
    if line is not None:
        call = RecordedCall(*kind_and_name, line)
        if call not in seen.calls:
            seen.calls.append(call)


def _builtin(function: Any) -> tuple[str, str] | None:
    owner = getattr(function, "__self__", None)
    if isinstance(owner, random.Random) and owner is not random._inst:
        return OWN, f"random.{type(owner).__name__}.{function.__name__}()"
    if isinstance(owner, type) and issubclass(owner, datetime.date):
        asks = function.__name__ in ("now", "utcnow", "today")
        return (CLOCK, f"{owner.__name__}.{function.__name__}()") if asks else None
    try:
        return _BUILTINS.get(function)
    except TypeError:
        return None  # not every callable can be a key


def _function(frame: FrameType) -> tuple[str, str] | None:
    code = frame.f_code
    if code is random.Random.seed.__code__:
        return (SEED, "random.seed()") if frame.f_locals.get("self") is random._inst else None
    if code is os._Environ.__getitem__.__code__:
        name = frame.f_locals.get("key")
        return (_VARIABLES[name], f'os.environ["{name}"]') if name in _VARIABLES else None
    return _FUNCTIONS.get(code)


def _line(frame: FrameType | None) -> str | None:
    """Return the user's line that makes the call, directly or through the standard library. Return
    None if torch, numpy or Lockstep makes it.
    """
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_PACKAGES):
            return None
        if not file.startswith("<") and (not file.startswith(_STDLIB) or "site-packages" in file):
            return f"{Path(file).name}, line {frame.f_lineno}"
        frame = frame.f_back
    return None


@contextmanager
def _numpy(seen: Seen) -> Iterator[None]:
    real = {name: getattr(np.random, name) for name in _NUMPY}

    def replacement(name: str) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            line = _line(sys._getframe(1))
            kind = _NUMPY[name]
            if name == "default_rng" and not args and not options:
                kind = ENTROPY
            if line is not None:
                seen.calls.append(RecordedCall(kind, f"numpy.random.{name}()", line))
            return real[name](*args, **options)

        return call

    try:
        for name in _NUMPY:
            setattr(np.random, name, replacement(name))
        yield
    finally:
        for name, function in real.items():
            setattr(np.random, name, function)


def _generators() -> list[Any]:
    """Return all generators that are alive, except those that Lockstep seeds."""
    kinds = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)
    keyed = (random._inst, torch.default_generator, np.random.mtrand._rand)
    tracked = gc.get_objects()
    alive: dict[int, Any] = {}
    for value in [*tracked, *gc.get_referents(*tracked)]:
        if issubclass(type(value), kinds) and not isinstance(value, random.SystemRandom):
            alive[id(value)] = value
    for generator in keyed:
        alive.pop(id(generator), None)
    return list(alive.values())


def _state(generator: Any) -> str:
    if isinstance(generator, random.Random):
        return digest_of(generator.getstate())
    if isinstance(generator, torch.Generator):
        return digest_of(generator.get_state())
    if isinstance(generator, np.random.Generator):
        return digest_of(generator.bit_generator.state)
    return digest_of(generator.get_state(legacy=False))
