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

    def far(self, other: Sketch) -> float:
        """Estimate the norm of the difference between the two tensors. It is infinite if the
        estimate is NaN.
        """
        if self.digest == other.digest:
            return 0.0
        found = max(abs(self.norm - other.norm), abs(self.projection - other.projection))
        return math.inf if math.isnan(found) else found


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
        slots = {slot: found for rank in ranks for slot, found in rank.steps[number].slots.items()}
        steps.append(
            TracedStep(
                epoch=step.epoch,
                slots=dict(sorted(slots.items())),
                loss=step.loss,
                weights=step.weights,
            )
        )
    again = {slot: digest for rank in ranks for slot, digest in rank.again.items()}
    return Trace(
        workers=first.workers,
        start=first.start,
        steps=steps,
        again=dict(sorted(again.items())),
        sha256=first.sha256,
        equal_noise=next((rank.equal_noise for rank in ranks if rank.equal_noise), None),
    )


def sketch(tensor: Tensor) -> Sketch:
    """Return the sketch of a tensor on any device. The call waits for the device."""
    tensor = tensor.detach().cpu()
    dense = tensor.to_dense() if tensor.layout != torch.strided else tensor
    values = torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense
    flat = values.reshape(-1).double()
    return Sketch(
        digest_of(dense),
        float(torch.linalg.vector_norm(flat)),
        float((flat * _signs(flat.numel())).sum()),
    )


def digest_of(value: Any) -> str:
    """Return a digest, 16 hexadecimal digits, of tensors, arrays, numbers and text in containers
    and dataclasses. Of other objects only the type counts.
    """
    found = hashlib.blake2b(digest_size=_BYTES)
    _add(found, value)
    return found.hexdigest()


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


def _add(found: Any, value: Any) -> None:
    if isinstance(value, Tensor):
        plain = value.detach().cpu()
        plain = (
            (plain.to_dense() if plain.layout != torch.strided else plain)
            .resolve_conj()
            .resolve_neg()
            .contiguous()
        )
        found.update(f"tensor {plain.dtype} {list(plain.shape)}".encode())
        found.update(plain.reshape(-1).view(torch.uint8).numpy().data)
    elif isinstance(value, np.ndarray) and value.dtype != object:
        found.update(f"array {value.dtype} {value.shape}".encode())
        found.update(value.tobytes())
    elif isinstance(value, Mapping):
        for name, part in value.items():
            found.update(f"key {name!r}".encode())
            _add(found, part)
    elif isinstance(value, (list, tuple)):
        found.update(f"{len(value)} parts".encode())
        for part in value:
            _add(found, part)
    elif value is None or isinstance(value, (str, bytes, bool, int, float, complex, np.generic)):
        found.update(f"{type(value).__name__} {value!r}".encode())
    else:
        found.update(f"a {type(value).__qualname__}".encode())
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            _add(found, [getattr(value, each.name) for each in dataclasses.fields(value)])


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
    def place(self) -> tuple[int, int | None, Kind]:
        return self.step, self.slot, self.kind


def first_difference(one: Trace, other: Trace, *, exact: bool) -> Difference | None:
    """Return the first difference between two trainings, or None. With `exact` every bit counts.
    Otherwise samples must have equal bits, and values must agree within a tolerance that grows
    with the steps.
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
    """Return the first micro-batch of the first step whose samples changed during the training, or
    None. This needs no second training.
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
    """Whether two runs of a micro-batch agree in its order, samples, loss or gradient (`kind`)."""
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
    """Return the relative tolerance at step `step`, counted from 1. It is 0 with `exact`."""
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
    """Return a difference of the weights in a step whose micro-batches agree, or None."""
    noise = _noise(ours) if tolerance else set()
    for name, one in ours.weights.items():
        other = theirs.weights[name]
        if name not in noise and not _near(one, other, one.norm, tolerance):
            return Difference(
                kind="weights", step=step, workers=workers, name=name, values=_norms(one, other)
            )
    return None


def _first_gradient(one: Slot, other: Slot, tolerance: float) -> str | None:
    """Return the parameter of the first gradient that differs, or None. Gradients come in the order
    of the backward: the first is nearest to the output, and the others are computed from it.
    """
    whole = math.hypot(*(found.norm for found in one.gradients.values()), 0.0)
    for name in dict.fromkeys([*one.gradients, *other.gradients]):
        ours, theirs = one.gradients.get(name), other.gradients.get(name)
        if ours is None or theirs is None or not _near(ours, theirs, whole, tolerance):
            return name
    return None


def _noise(step: TracedStep) -> set[str]:
    """Return the parameters whose gradient is a rounding error in every micro-batch. An optimizer
    that divides by the gradient's size still takes a full step with it.
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
