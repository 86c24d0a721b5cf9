"""A profile whose figures make arithmetic easy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lockstep.tools.plan.profile import GradientBucket, PhaseTimes, Profile

ALONE = PhaseTimes(
    ranks=1,
    threads=2,
    steps=9,
    forward=1.0,
    backward=2.0,
    optimizer=0.5,
    other=0.25,
    loading=0.125,
    spread=0.01,
)
PAIR = replace(ALONE, ranks=2, threads=1, forward=1.5, backward=3.0)


def profile(**changes: Any) -> Profile:
    """Eight micro-batches of 8, a megabyte of gradients in two buckets, on a host of two cores."""
    buckets = (
        GradientBucket(ready=0.5, elements=125_000, tensors=((500, 250),)),
        GradientBucket(ready=1.0, elements=125_000, tensors=((125_000,),)),
    )
    given: dict[str, Any] = {
        "task": "digits",
        "device": "cpu",
        "cores": 2,
        "global_batch": 64,
        "micro_batch": 8,
        "buckets": buckets,
        "width": 4,
        "buffers": 0,
        "messages": {2: 0.0, 4: 0.0, 8: 0.0},
        "sides": {1: ALONE, 2: PAIR},
    }
    return Profile(**given | changes)
