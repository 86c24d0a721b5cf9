"""What to do about communication that takes too much of a step: sentences, each with what it would give, the gentlest first."""

from __future__ import annotations

import math
from collections.abc import Mapping

from lockstep.method import Method

COMPRESSIONS = ("--compress bf16", "--compress int8", "--compress powersgd:4")


def advice(
    now: float, compressed: Mapping[str, float], *, samples: int, micro_batches: int, world_size: int, method: Method, limit: float
) -> tuple[str, ...]:
    """`now` is the ratio, `compressed` what it would be with each of these. Says that nothing is to be done where it is within `limit`."""
    if now <= limit:
        return (_enough(now, limit, world_size),)
    times = math.ceil(now / limit)
    doubled = 2 ** math.ceil(math.log2(now / limit))
    found = [
        f"micro-batches of {times * samples} samples in place of {samples}, where they fit and train as well: about {now / times:.2g}",
        f"accumulate {doubled * micro_batches} micro-batches of {samples}: {now / doubled:.2g}; each step sends as much, and there are fewer steps",
    ]
    if method.compression is None and method.local is None and method.server is None:
        found += [f"{name}: {ratio:.2g}, if compressing costs nothing" for name, ratio in compressed.items() if ratio < now]
        found.append(f"--sync-every {times}: {now / times:.2g}; replicas differ between meetings, so the training is another")
    return tuple(found)


def _enough(now: float, limit: float, world_size: int) -> str:
    if world_size == 1:
        return "one rank sends nothing: there is nothing to do"
    if now == 0:
        return "communication is free: there is nothing to do"
    room = limit / now
    return f"communication is not significant: there is nothing to do (it would be on a link {room:.3g} times slower)"
