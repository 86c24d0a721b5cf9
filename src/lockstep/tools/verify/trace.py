"""The trace of a training, step by step, and the first difference between two traces.

Every micro-batch is traced on the rank that runs it, before gradients are added up; `merge` joins
the ranks' traces. The gradients of all micro-batches would take many times the size of the model,
so a trace keeps of each tensor a digest of its bits, its norm, and its projection on fixed random
signs. If two tensors differ by d, their projections differ by about the norm of d, at any length.

A difference spreads: other samples give another loss, other gradients, other weights, and from then
on everything differs. So the traces are compared step by step, and in a step in the order of
causes, each over all micro-batches:

    order       which samples a micro-batch holds
    samples     the contents of these samples
    loss        from equal samples and equal weights
    gradient    the micro-batch's own gradient, from an equal loss
    weights     after equal gradients were added up and applied
    again       the first step's samples, read again after the training
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

_SEED = 20
_BYTES = 8


@dataclass(frozen=True, slots=True)
class Sketch:
    """A tensor's digest, norm and projection."""

    digest: str
    """The digest of dtype, shape and bits."""
    norm: float
    projection: float
    """The sum of the elements, each with a sign that depends on its index alone."""

    def distance(self, other: Sketch) -> float:
        """Estimate the norm of the difference between the two tensors. It is infinite if the
        estimate is NaN.
        """
        if self.digest == other.digest:
            return 0.0
        estimate = max(abs(self.norm - other.norm), abs(self.projection - other.projection))
        return math.inf if math.isnan(estimate) else estimate


@dataclass(slots=True)
class Slot:
    """The trace of one micro-batch."""

    rank: int
    """The rank that ran it."""
    indices: tuple[int, ...] | None
    """The indices of its samples; None for a stream, whose samples have no index."""
    samples: str
    """The digest of the batch before the task's functions see it."""
    loss: float = 0.0
    random: Mapping[str, str] = field(default_factory=dict)
    """The digests of the random states after the loss, by generator."""
    gradients: dict[str, Sketch] = field(default_factory=dict)
    """Its own gradients, by parameter, before they are added to those of other micro-batches."""


@dataclass(slots=True)
class TracedStep:
    """The trace of one optimizer step."""

    epoch: int
    """Counts from 0."""
    slots: dict[int, Slot]
    loss: float
    weights: Mapping[str, Sketch]
    """Parameters and buffers after the step."""


@dataclass(slots=True)
class Trace:
    """The trace of a training, or one rank's part of it."""

    workers: int
    start: Mapping[str, Sketch]
    """The weights before the first step."""
    steps: list[TracedStep]
    again: Mapping[int, str] = field(default_factory=dict)
    """The digests of the first step's samples, read again after the training, by slot."""
    sha256: str = ""
    """The checksum of the final weights."""
    equal_noise: tuple[int, int] | None = None
    """Two samples of the first step that get the same noise."""


def merge(ranks: Sequence[Trace]) -> Trace:
    """Join the ranks' traces. The weights are those of rank 0: the Stepper checks that replicas
    are equal.
    """
    first = ranks[0]
    steps = []
    for number, step in enumerate(first.steps):
        slots: dict[int, Slot] = {}
        for rank in ranks:
            slots |= rank.steps[number].slots
        steps.append(dataclasses.replace(step, slots=dict(sorted(slots.items()))))
    again: dict[int, str] = {}
    for rank in ranks:
        again |= rank.again
    return dataclasses.replace(
        first,
        steps=steps,
        again=dict(sorted(again.items())),
        equal_noise=next((rank.equal_noise for rank in ranks if rank.equal_noise), None),
    )


def sketch(tensor: Tensor) -> Sketch:
    """Return the sketch of a tensor on any device. The call waits for the device."""
    dense = _dense(tensor)
    values = torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense
    flat = values.reshape(-1).double()
    norm = float(torch.linalg.vector_norm(flat))
    projection = float((flat * _signs(flat.numel())).sum())
    return Sketch(digest_of(dense), norm, projection)


def _dense(tensor: Tensor) -> Tensor:
    tensor = tensor.detach().cpu()
    return tensor if tensor.layout == torch.strided else tensor.to_dense()


def digest_of(value: Any) -> str:
    """Return a digest, 16 hexadecimal digits, of tensors, arrays, numbers and text in containers
    and dataclasses. Of other objects only the type counts.
    """
    digest = hashlib.blake2b(digest_size=_BYTES)
    _add(digest, value)
    return digest.hexdigest()


def random_states(device: torch.device) -> dict[str, str]:
    """Return a digest of the state of each generator that a step's stream seeds, by name."""
    states = {
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state(),
        "random": random.getstate(),
    }
    if device.type == "cuda":
        states["the GPU"] = torch.cuda.get_rng_state(device)
    return {name: digest_of(state) for name, state in states.items()}


@lru_cache(maxsize=256)
def _signs(count: int) -> Tensor:
    generator = torch.Generator().manual_seed(_SEED)
    return torch.randint(0, 2, (count,), generator=generator, dtype=torch.int8) * 2 - 1


def _add(digest: Any, value: Any) -> None:
    if isinstance(value, Tensor):
        plain = _dense(value).resolve_conj().resolve_neg().contiguous()
        digest.update(f"tensor {plain.dtype} {list(plain.shape)}".encode())
        digest.update(plain.reshape(-1).view(torch.uint8).numpy().data)
    elif isinstance(value, np.ndarray) and value.dtype != object:
        digest.update(f"array {value.dtype} {value.shape}".encode())
        digest.update(value.tobytes())
    elif isinstance(value, Mapping):
        for name, part in value.items():
            digest.update(f"key {name!r}".encode())
            _add(digest, part)
    elif isinstance(value, (list, tuple)):
        digest.update(f"{len(value)} parts".encode())
        for part in value:
            _add(digest, part)
    elif value is None or isinstance(value, (str, bytes, bool, int, float, complex, np.generic)):
        digest.update(f"{type(value).__name__} {value!r}".encode())
    else:
        digest.update(f"a {type(value).__qualname__}".encode())
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            names = [field.name for field in dataclasses.fields(value)]
            _add(digest, [getattr(value, name) for name in names])


Kind = Literal["start", "order", "samples", "loss", "gradient", "weights", "again"]

_IN_A_SLOT: tuple[Kind, ...] = ("order", "samples", "loss", "gradient")
TOLERANCE = 1e-5
_GROWTH = 2.0  # a step multiplies the differences that earlier steps left
_MOST = 1e-2
# A fraction of the norm of a micro-batch's whole gradient. A parameter whose gradient is smaller
# moves by rounding errors, for example a bias before BatchNorm.
_NOISE = 1e-5


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """The first difference between two trainings. Steps count from 1, slots (the micro-batches of
    a step) from 0.
    """

    kind: Kind
    step: int
    """0 means before the first step."""
    workers: tuple[int, int]
    slot: int | None = None
    name: str | None = None
    """The first parameter or buffer that differs; for a loss, the first whose gradient differs."""
    ranks: tuple[int, int] | None = None
    """The ranks that ran the micro-batch, one for each training."""
    values: tuple[float, float] | None = None
    epoch: int = 0
    """Counts from 0."""
    indices: tuple[int, ...] | None = None
    """The samples of the micro-batch."""
    reseeded: tuple[str, ...] = ()
    """Generators whose states after the loss differ."""

    @property
    def position(self) -> tuple[int, int | None, Kind]:
        return self.step, self.slot, self.kind


def first_difference(one: Trace, other: Trace, *, exact: bool) -> Difference | None:
    """Return the first difference between two trainings, or None. With `exact` every bit counts.
    Otherwise samples must have equal bits, and values must agree within a tolerance that grows
    with the steps.
    """
    workers = (one.workers, other.workers)
    for name, weight in one.start.items():
        if weight.digest != other.start[name].digest:
            values = _norms(weight, other.start[name])
            return Difference(kind="start", step=0, workers=workers, name=name, values=values)
    for number, (step, other_step) in enumerate(zip(one.steps, other.steps, strict=True), 1):
        tolerance = tolerance_at(number, exact=exact)
        difference = _in_step(step, other_step, number, workers, tolerance)
        if difference is not None:
            return difference
    return None


def read_again(trace: Trace) -> Difference | None:
    """Return the first micro-batch of the first step whose samples changed during the training, or
    None. This needs no second training.
    """
    for slot, digest in trace.again.items():
        first = trace.steps[0].slots[slot]
        if digest != first.samples:
            return Difference(
                kind="again",
                step=1,
                workers=(trace.workers, trace.workers),
                slot=slot,
                ranks=(first.rank, first.rank),
                epoch=trace.steps[0].epoch,
                indices=first.indices,
            )
    return None


def alike(kind: Kind, one: Slot, other: Slot, tolerance: float) -> bool:
    """Whether two runs of a micro-batch agree in its order, samples, loss or gradient (`kind`)."""
    if kind == "order":
        return one.indices == other.indices
    if kind == "samples":
        return one.samples == other.samples
    if kind == "loss":
        return _numbers_agree(one.loss, other.loss, tolerance)
    return _first_gradient(one, other, tolerance) is None


def tolerance_at(step: int, *, exact: bool) -> float:
    """Return the relative tolerance at step `step`, counted from 1. It is 0 with `exact`."""
    return 0.0 if exact else min(_MOST, TOLERANCE * _GROWTH ** (step - 1))


def _in_step(
    one: TracedStep, other: TracedStep, step: int, workers: tuple[int, int], tolerance: float
) -> Difference | None:
    assert one.slots.keys() == other.slots.keys(), "the cut does not depend on the number of ranks"
    for kind in _IN_A_SLOT:
        for number, slot in one.slots.items():
            other_slot = other.slots[number]
            if alike(kind, slot, other_slot, tolerance):
                continue
            name = None
            values = None
            if kind in ("loss", "gradient"):
                name = _first_gradient(slot, other_slot, tolerance)
            if kind == "loss":
                values = (slot.loss, other_slot.loss)
            elif kind == "gradient" and name is not None:
                values = _norms(slot.gradients.get(name), other_slot.gradients.get(name))
            states = slot.random.items()
            return Difference(
                kind=kind,
                step=step,
                workers=workers,
                slot=number,
                name=name,
                ranks=(slot.rank, other_slot.rank),
                values=values,
                indices=slot.indices,
                reseeded=tuple(
                    library for library, state in states if state != other_slot.random.get(library)
                ),
                epoch=one.epoch,
            )
    return _after(one, other, step, workers, tolerance)


def _after(
    one: TracedStep, other: TracedStep, step: int, workers: tuple[int, int], tolerance: float
) -> Difference | None:
    """Return a difference of the weights in a step whose micro-batches agree, or None."""
    noise = _noise(one) if tolerance else set()
    for name, weight in one.weights.items():
        other_weight = other.weights[name]
        if name not in noise and not _sketches_agree(weight, other_weight, weight.norm, tolerance):
            values = _norms(weight, other_weight)
            return Difference(kind="weights", step=step, workers=workers, name=name, values=values)
    return None


def _first_gradient(one: Slot, other: Slot, tolerance: float) -> str | None:
    """Return the parameter of the first gradient that differs, or None. Gradients come in the order
    of the backward: the first is nearest to the output, and the others are computed from it.
    """
    size = _gradient_norm(one)
    for name in dict.fromkeys([*one.gradients, *other.gradients]):
        gradient = one.gradients.get(name)
        other_gradient = other.gradients.get(name)
        if gradient is None or other_gradient is None:
            return name
        if not _sketches_agree(gradient, other_gradient, size, tolerance):
            return name
    return None


def _gradient_norm(slot: Slot) -> float:
    return math.hypot(*(gradient.norm for gradient in slot.gradients.values()), 0.0)


def _noise(step: TracedStep) -> set[str]:
    """Return the parameters whose gradient is a rounding error in every micro-batch. An optimizer
    that divides by the gradient's size still takes a full step with it.
    """
    noise: set[str] = set()
    for number, slot in enumerate(step.slots.values()):
        largest = _NOISE * _gradient_norm(slot)
        gradients = slot.gradients.items()
        small = {name for name, gradient in gradients if gradient.norm <= largest}
        noise = noise & small if number else small
    return noise


def _sketches_agree(one: Sketch, other: Sketch, size: float, tolerance: float) -> bool:
    if one.digest == other.digest:
        return True
    return tolerance > 0 and one.distance(other) <= tolerance * max(size, other.norm)


def _numbers_agree(one: float, other: float, tolerance: float) -> bool:
    if one == other or (math.isnan(one) and math.isnan(other)):
        return True
    return abs(one - other) <= tolerance * max(abs(one), abs(other))


def _norms(one: Sketch | None, other: Sketch | None) -> tuple[float, float] | None:
    return None if one is None or other is None else (one.norm, other.norm)
