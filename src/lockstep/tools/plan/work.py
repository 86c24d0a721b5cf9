"""What a rank has to do in a step, as a simulation takes it: measured of a task, or from a table
of models.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.errors import UsageError
from lockstep.tools.timing.profile import Leaves

WIDTH = 4  # bytes of an element: float32
# of a micro-batch's time: products for the inputs' gradients and for the weights', where a forward
# has one
BACKWARD = 2 / 3


@dataclass(frozen=True, kw_only=True, slots=True)
class RankWork:
    """Of the rank that has most micro-batches. Seconds are means; raises UsageError for what
    cannot be.
    """

    forward: float
    """Of one micro-batch."""
    backward: float
    """Of one micro-batch."""
    micro_batches: int
    optimizer: float = 0.0
    other: float = 0.0
    """What a step takes besides, however many micro-batches it has: Python's part, records,
    checks.
    """
    spread: float = 0.0
    """Standard deviation of what a rank computes in a step, over its mean; independent from rank
    to rank.
    """
    in_turns: float = 1.0
    """Ranks that take turns on one core: who is done leaves it to the others, so only their sum
    can be late.
    """
    buckets: Sequence[Leaves] = ()
    """In the order in which they leave."""
    width: float = WIDTH
    """Bytes of an element of a gradient."""
    facts: int = 0
    """Bytes that ranks tell each other before the last backward of a step: weights, losses."""
    buffers: int = 0
    """Bytes that are averaged after the gradients in every step: BatchNorm's statistics."""
    loading: float = 0.0
    """Seconds that a rank's samples of a step take to load."""
    ahead: bool = False
    """Loading goes on beside the computation, on cores of its own."""
    samples: float = 0.0
    """Of a rank in a step: only a shared storage looks at them."""
    layers: int = 0
    """Blocks between which the model can be cut. Only a mesh with pipeline or tensor looks at
    it.
    """
    activation: float = 0.0
    """Bytes that go from one block to the next for one micro-batch. As `layers`."""

    def __post_init__(self) -> None:
        for name in (
            "forward",
            "backward",
            "optimizer",
            "other",
            "spread",
            "loading",
            "samples",
            "activation",
        ):
            if not 0 <= getattr(self, name) < math.inf:
                raise UsageError(f"{name}={getattr(self, name)}: give a finite number, 0 or more")
        if self.micro_batches < 1:
            raise UsageError(
                f"micro_batches={self.micro_batches}: a rank has at least one in a step"
            )
        for bucket in self.buckets:
            if not 0 <= bucket.ready <= 1:
                raise UsageError(
                    f"ready={bucket.ready}: a bucket is complete after a share of the backward, 0"
                    " to 1"
                )

    @property
    def elements(self) -> int:
        return sum(bucket.elements for bucket in self.buckets)

    @property
    def bytes(self) -> float:
        """Of all gradients."""
        return self.width * self.elements

    @property
    def computation(self) -> float:
        """Seconds of forwards and backwards in a step."""
        return self.micro_batches * (self.forward + self.backward)
