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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
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
class AskedFor:
    """A recorded call: its kind, its name and the line of the caller."""

    what: str
    name: str
    place: str
    """file.py, line 12"""

    def __str__(self) -> str:
        return f"{self.name} ({self.place})"


@dataclass(slots=True)
class Seen:
    """The recorded calls of one run of a block."""

    calls: list[AskedFor] = field(default_factory=list)
    moved: list[str] = field(default_factory=list)
    """The kinds of the user's own generators whose state changed."""

    def of(self, *what: str) -> list[AskedFor]:
        return [call for call in self.calls if call.what in what]


@contextmanager
def watching() -> Iterator[Seen]:
    """Record what the block calls in this thread, and which generators it draws from."""
    seen = Seen()
    before = {id(each): (each, _state(each)) for each in _generators()}
    profiler = sys.getprofile()
    with _numpy(seen):
        sys.setprofile(_noting(seen))
        try:
            yield seen
        finally:
            sys.setprofile(profiler)
    moved = [_kind(each) for each, state in before.values() if _state(each) != state]
    seen.moved = list(dict.fromkeys(moved))


def _kind(generator: Any) -> str:
    kinds = {torch.Generator: "torch", random.Random: "random"}
    library = next(
        (name for kind, name in kinds.items() if isinstance(generator, kind)), "numpy.random"
    )
    return f"{library}.{type(generator).__name__}"


def _noting(seen: Seen) -> Callable[[FrameType, str, Any], None]:
    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "c_call":
            found = _builtin(argument)
            caller: FrameType | None = frame
        elif event == "call":
            found = _function(frame)
            caller = frame.f_back
        else:
            return
        place = found and _place(caller)
        if found and place:
            call = AskedFor(*found, place)
            if call not in seen.calls:
                seen.calls.append(call)

    return note


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


def _place(frame: FrameType | None) -> str | None:
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

    def standing_in(name: str) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            place = _place(sys._getframe(1))
            what = ENTROPY if name == "default_rng" and not args and not options else _NUMPY[name]
            if place:
                seen.calls.append(AskedFor(what, f"numpy.random.{name}()", place))
            return real[name](*args, **options)

        return call

    try:
        for name in _NUMPY:
            setattr(np.random, name, standing_in(name))
        yield
    finally:
        for name, function in real.items():
            setattr(np.random, name, function)


def _generators() -> list[Any]:
    """Return all generators that are alive, except those that Lockstep seeds."""
    kinds = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)
    tracked = gc.get_objects()
    keyed = {id(each) for each in (random._inst, torch.default_generator, np.random.mtrand._rand)}
    found = {
        id(each): each
        for each in [*tracked, *gc.get_referents(*tracked)]
        if issubclass(type(each), kinds)
    }
    return [
        each
        for number, each in found.items()
        if number not in keyed and not isinstance(each, random.SystemRandom)
    ]


def _state(generator: Any) -> str:
    if isinstance(generator, random.Random):
        return digest_of(generator.getstate())
    if isinstance(generator, torch.Generator):
        return digest_of(generator.get_state())
    state = (
        generator.bit_generator.state
        if isinstance(generator, np.random.Generator)
        else generator.get_state(legacy=False)
    )
    return digest_of(state)
