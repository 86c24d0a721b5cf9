"""What stands for a tensor in a trace: a digest of its bits, and two numbers from which a distance can be told.

Whole gradients of every micro-batch would be the size of the model many times over. The projection on fixed signs of two tensors that
differ by d differs by about the norm of d, whatever their length, so that two sketches say how far apart the tensors are.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
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
        """About how far apart the two are: the norm of their difference, give or take. Infinite where one is not finite."""
        if self.digest == other.digest:
            return 0.0
        found = max(abs(self.norm - other.norm), abs(self.projection - other.projection))
        return math.inf if math.isnan(found) else found


def sketch(tensor: Tensor) -> Sketch:
    """Of a tensor on any device. Waits for it."""
    tensor = tensor.detach().cpu()
    dense = tensor.to_dense() if tensor.layout != torch.strided else tensor
    values = torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense
    flat = values.reshape(-1).double()
    return Sketch(digest_of(dense), float(torch.linalg.vector_norm(flat)), float((flat * _signs(flat.numel())).sum()))


def digest_of(value: Any) -> str:
    """16 hexadecimal digits of a batch: tensors, arrays, numbers and text, in any containers. Of other objects only the type counts."""
    found = hashlib.blake2b(digest_size=_BYTES)
    _add(found, value)
    return found.hexdigest()


def random_states(device: torch.device) -> dict[str, str]:
    """A digest of each generator that a step's stream seeds, by its name."""
    states = {"torch": torch.get_rng_state(), "numpy": np.random.get_state(), "random": random.getstate()}
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
        plain = (plain.to_dense() if plain.layout != torch.strided else plain).resolve_conj().resolve_neg().contiguous()
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
