"""What a training leaves behind, step by step: enough to say where two trainings part, and small
enough to keep.

Every micro-batch is looked at on the rank that runs it, before anything is added up; `merge` puts
the ranks' accounts together. Whole gradients of every micro-batch would be the size of the model
many times over: a digest of a tensor's bits stands for it, and two numbers from which a distance
can be told. The projection on fixed signs of two tensors that differ by d differs by about the norm
of d, whatever their length.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

_SEED = 20
_BYTES = 8


@dataclass(frozen=True, slots=True)
class Sketch:
    """One tensor."""

    digest: str
    """Of dtype, shape and bits."""
    norm: float
    projection: float
    """Sum of the elements, each with a sign that depends on its place alone."""

    def far(self, other: Sketch) -> float:
        """About how far apart the two are: the norm of their difference, give or take. Infinite
        where one is not finite.
        """
        if self.digest == other.digest:
            return 0.0
        found = max(abs(self.norm - other.norm), abs(self.projection - other.projection))
        return math.inf if math.isnan(found) else found


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
class TracedStep:
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
    steps: list[TracedStep]
    again: Mapping[int, str] = field(default_factory=dict)
    """By slot: digest of the first step's samples when they are read once more, after the
    training.
    """
    sha256: str = ""
    """Of the weights at the end."""


def merge(ranks: Sequence[Trace]) -> Trace:
    """The whole training's trace. The weights are rank 0's: that replicas are equal is the
    Stepper's affair.
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
    )


def sketch(tensor: Tensor) -> Sketch:
    """Of a tensor on any device. Waits for it."""
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
    """16 hexadecimal digits of a batch: tensors, arrays, numbers and text, in any containers. Of
    other objects only the type counts.
    """
    found = hashlib.blake2b(digest_size=_BYTES)
    _add(found, value)
    return found.hexdigest()


def random_states(device: torch.device) -> dict[str, str]:
    """A digest of each generator that a step's stream seeds, by its name."""
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
