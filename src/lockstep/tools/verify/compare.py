"""Two traces of one task, and the first place where they part. Pure.

A difference spreads: other samples give another loss, other gradients, other weights, and from then
on everything differs. So each step is gone through in the order of causes, over all of its
micro-batches:

    order       which samples a micro-batch holds
    samples     what those samples are
    loss        of equal samples and equal weights
    gradient    of an equal loss, the micro-batch's own
    weights     after equal gradients were added up and applied
    again       the first step's samples, read once more after the training
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from lockstep.tools.verify.trace import Sketch, Slot, Trace, TracedStep

Kind = Literal["start", "order", "samples", "loss", "gradient", "weights", "again"]

_IN_A_SLOT: tuple[Kind, ...] = ("order", "samples", "loss", "gradient")
TOLERANCE = 1e-5
_GROWTH = 2.0  # a step multiplies what the steps before it left
_MOST = 1e-2
# Of a micro-batch's whole gradient: a parameter whose own is below it moves by rounding errors, as
# a bias before BatchNorm.
_NOISE = 1e-5


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """The first one between two trainings. Steps count from 1, slots (the micro-batches of a
    step) from 0.
    """

    kind: Kind
    step: int
    """0: before the first."""
    workers: tuple[int, int]
    slot: int | None = None
    name: str | None = None
    """The first parameter (or buffer) that differs; for a loss, the first whose gradient does."""
    ranks: tuple[int, int] | None = None
    """That ran the micro-batch."""
    values: tuple[float, float] | None = None
    epoch: int = 0
    """Counts from 0."""
    indices: tuple[int, ...] | None = None
    """The samples of the micro-batch."""
    reseeded: tuple[str, ...] = ()
    """Generators whose state after the loss was not the same."""

    @property
    def place(self) -> tuple[int, int | None, Kind]:
        return self.step, self.slot, self.kind


def first_difference(one: Trace, other: Trace, *, exact: bool) -> Difference | None:
    """`exact`: every bit counts. Else samples are compared by bits, and values within a
    tolerance that grows with the steps.
    """
    workers = (one.workers, other.workers)
    for name in one.start:
        if one.start[name].digest != other.start[name].digest:
            return Difference(
                kind="start",
                step=0,
                workers=workers,
                name=name,
                values=_norms(one.start[name], other.start[name]),
            )
    for number, (ours, theirs) in enumerate(zip(one.steps, other.steps, strict=True), 1):
        found = _in_step(ours, theirs, number, workers, tolerance_at(number, exact=exact))
        if found is not None:
            return found
    return None


def read_again(trace: Trace) -> Difference | None:
    """The first micro-batch of the first step whose samples were others after the training. No
    second training is needed to see it.
    """
    for slot, digest in trace.again.items():
        first = trace.steps[0].slots[slot]
        if digest != first.samples:
            ranks, workers = (first.rank, first.rank), (trace.workers, trace.workers)
            epoch = trace.steps[0].epoch
            return Difference(
                kind="again",
                step=1,
                workers=workers,
                slot=slot,
                ranks=ranks,
                epoch=epoch,
                indices=first.indices,
            )
    return None


def alike(kind: Kind, one: Slot, other: Slot, tolerance: float) -> bool:
    """Whether two runs of a micro-batch agree in what a difference of this kind is about."""
    if kind == "order":
        return one.indices == other.indices
    if kind == "samples":
        return one.samples == other.samples
    return (
        _close(one.loss, other.loss, tolerance)
        if kind == "loss"
        else _first_gradient(one, other, tolerance) is None
    )


def tolerance_at(step: int, *, exact: bool) -> float:
    """Relative, at step `step` counted from 1. 0 where bits count."""
    return 0.0 if exact else min(_MOST, TOLERANCE * _GROWTH ** (step - 1))


def _in_step(
    ours: TracedStep, theirs: TracedStep, step: int, workers: tuple[int, int], tolerance: float
) -> Difference | None:
    assert ours.slots.keys() == theirs.slots.keys(), (
        "the cut does not depend on the number of ranks"
    )
    for kind in _IN_A_SLOT:
        for slot, one in ours.slots.items():
            other = theirs.slots[slot]
            if alike(kind, one, other, tolerance):
                continue
            name = _first_gradient(one, other, tolerance) if kind in ("loss", "gradient") else None
            values = (one.loss, other.loss) if kind == "loss" else None
            if kind == "gradient" and name is not None:
                values = _norms(one.gradients.get(name), other.gradients.get(name))
            moved = tuple(
                library
                for library in one.random
                if one.random[library] != other.random.get(library)
            )
            return Difference(
                kind=kind,
                step=step,
                workers=workers,
                slot=slot,
                name=name,
                ranks=(one.rank, other.rank),
                values=values,
                indices=one.indices,
                reseeded=moved,
                epoch=ours.epoch,
            )
    return _after(ours, theirs, step, workers, tolerance)


def _after(
    ours: TracedStep, theirs: TracedStep, step: int, workers: tuple[int, int], tolerance: float
) -> Difference | None:
    """Weights that differ though nothing before them does."""
    noise = _noise(ours) if tolerance else set()
    for name, one in ours.weights.items():
        other = theirs.weights[name]
        if name not in noise and not _near(one, other, one.norm, tolerance):
            return Difference(
                kind="weights", step=step, workers=workers, name=name, values=_norms(one, other)
            )
    return None


def _first_gradient(one: Slot, other: Slot, tolerance: float) -> str | None:
    """By the order in which they arrived: the nearest to the output, which the others are
    computed from.
    """
    whole = math.hypot(*(found.norm for found in one.gradients.values()), 0.0)
    for name in dict.fromkeys([*one.gradients, *other.gradients]):
        ours, theirs = one.gradients.get(name), other.gradients.get(name)
        if ours is None or theirs is None or not _near(ours, theirs, whole, tolerance):
            return name
    return None


def _noise(step: TracedStep) -> set[str]:
    """Parameters whose gradient is rounding error in every micro-batch. Optimizers that divide
    by its size make a step of it all the same.
    """
    found: set[str] | None = None
    for slot in step.slots.values():
        whole = math.hypot(*(each.norm for each in slot.gradients.values()), 0.0)
        small = {name for name, each in slot.gradients.items() if each.norm <= _NOISE * whole}
        found = small if found is None else found & small
    return found or set()


def _near(one: Sketch, other: Sketch, size: float, tolerance: float) -> bool:
    if one.digest == other.digest:
        return True
    return tolerance > 0 and one.far(other) <= tolerance * max(size, other.norm)


def _close(one: float, other: float, tolerance: float) -> bool:
    if one == other or (math.isnan(one) and math.isnan(other)):
        return True
    return abs(one - other) <= tolerance * max(abs(one), abs(other))


def _norms(one: Sketch | None, other: Sketch | None) -> tuple[float, float] | None:
    return None if one is None or other is None else (one.norm, other.norm)
