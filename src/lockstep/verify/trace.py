"""What a training leaves behind, step by step: enough to say where two trainings part, and small enough to keep.

Every micro-batch is looked at on the rank that runs it, before anything is added up; `merge` puts the ranks' accounts together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lockstep.verify.digest import Sketch


@dataclass(slots=True)
class Slot:
    """One micro-batch."""

    rank: int
    """That ran it."""
    indices: tuple[int, ...] | None
    """The numbers of its samples; None for a stream, whose samples have none."""
    samples: str
    """Digest of the batch, before the task's functions see it."""
    loss: float = 0.0
    random: Mapping[str, str] = field(default_factory=dict)
    """The random states after the loss."""
    gradients: dict[str, Sketch] = field(default_factory=dict)
    """Its own, by parameter, before they are added to others'."""


@dataclass(slots=True)
class Step:
    """One optimizer step."""

    epoch: int
    """Counts from 0."""
    slots: dict[int, Slot]
    loss: float
    weights: Mapping[str, Sketch]
    """Parameters and buffers after it."""


@dataclass(slots=True)
class Trace:
    """One training, or one rank's part of it."""

    workers: int
    start: Mapping[str, Sketch]
    """The weights before the first step."""
    steps: list[Step]
    again: Mapping[int, str] = field(default_factory=dict)
    """By slot: digest of the first step's samples when they are read once more, after the training."""
    sha256: str = ""
    """Of the weights at the end."""


def merge(ranks: Sequence[Trace]) -> Trace:
    """The whole training's trace. The weights are rank 0's: that replicas are equal is the Stepper's affair."""
    first = ranks[0]
    steps = []
    for number, step in enumerate(first.steps):
        slots = {slot: found for rank in ranks for slot, found in rank.steps[number].slots.items()}
        steps.append(Step(epoch=step.epoch, slots=dict(sorted(slots.items())), loss=step.loss, weights=step.weights))
    again = {slot: digest for rank in ranks for slot, digest in rank.again.items()}
    return Trace(workers=first.workers, start=first.start, steps=steps, again=dict(sorted(again.items())), sha256=first.sha256)
