"""Keyed randomness for plain scripts: one seed for all ranks, and blocks that draw from a stream of
their own.

    lockstep.seed(0)                            # the model is built equal on all ranks
    model = Net()
    with lockstep.stream("rank"):               # on purpose different on every rank
        noise = torch.randn(8)
    with lockstep.stream("sample", epoch, 17):  # the same on whichever rank draws it, in epoch
    `epoch`
        image = augment(image)

`torch.manual_seed(seed + rank)` before the model is built makes another model on every rank, and
what is drawn with seed 0 on rank 1 is what seed 1 draws on rank 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from lockstep.config.knob import chosen, whole
from lockstep.errors import UsageError
from lockstep.runtime import randomness
from lockstep.runtime.environment import rank_and_size

Kind = Literal["rank", "step", "sample"]
_KEYS = {
    "rank": "any whole numbers",
    "step": "step and, if you like, slot",
    "sample": "epoch and index",
}
_LENGTHS: dict[str, range] = {"rank": range(100), "step": range(1, 3), "sample": range(2, 3)}
_seed: int | None = None


def seed(seed: int) -> None:
    """Seed torch (GPUs too), numpy's global generator and `random`, equal on all ranks, and the
    streams of `stream`.

    Raises UsageError for what is not a whole number.
    """
    global _seed
    number = whole("seed", seed, -math.inf)
    randomness.shared(number)
    _seed = number


@contextmanager
def stream(kind: Kind, *key: int) -> Iterator[None]:
    """Draw from a stream of its own within the block; afterwards the random states are what they
    were, also when it raises.

    "rank", *key: another on every rank. "step", step, slot=0: of a micro-batch's forward, as a
    Stepper with this seed enters it. "sample", epoch, index: of one sample in one epoch, as a
    Loader with this seed enters it (torch's CPU generator, numpy, `random`). Raises UsageError
    before `lockstep.seed` was called, for an unknown kind and for a key of the wrong length.
    """
    if _seed is None:
        raise UsageError("seed-not-set")
    chosen("kind", kind, _KEYS)
    numbers = [whole("key", each, -math.inf) for each in key]
    if len(numbers) not in _LENGTHS[kind]:
        raise UsageError("stream-key-wrong", kind=kind, key=list(key), expected=_KEYS[kind])
    with randomness.preserved(devices=kind != "sample"):
        if kind == "rank":
            randomness.rank(_seed, rank_and_size()[0], *numbers)
        elif kind == "step":
            randomness.step(_seed, numbers[0], numbers[1] if len(numbers) > 1 else 0)
        else:
            randomness.sample(_seed, numbers[0], numbers[1])
        yield
