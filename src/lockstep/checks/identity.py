"""A model's tensors by name, and one SHA-256 of them, which two runs can compare and which can be
computed again from a checkpoint's file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from lockstep.errors import TaskError


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and persistent buffers of a model by sorted name: what a checkpoint
    holds. The tensors are the model's own.

    A tensor that has several names (tied weights) is there once, under the first of them;
    `under_all_names` adds the others. Raises TaskError if a module keeps extra state that is not a
    tensor, because it could not be stored without pickle.
    """
    tensors = {}
    seen = set()
    for name, value in sorted(model.state_dict(keep_vars=True).items()):
        if not isinstance(value, Tensor):
            raise TaskError("extra-state-not-a-tensor", name=name, type=type(value).__name__)
        if id(value) not in seen:
            seen.add(id(value))
            tensors[name] = value.detach()
    return tensors


def under_all_names(tensors: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Return `tensors`, named as by `weights(model)`, also under the other names of tied weights.
    Nothing is copied.
    """
    first_names: dict[int, str] = {}
    renamed = dict(tensors)
    for name, value in sorted(model.state_dict(keep_vars=True).items()):
        first = first_names.setdefault(id(value), name)
        renamed[name] = tensors[first]
    return renamed


def sha256(tensors: Mapping[str, Tensor]) -> str:
    """Return 64 hexadecimal digits over the tensors' raw bytes, in the order of sorted names."""
    digest = hashlib.sha256()
    for _, tensor in sorted(tensors.items()):
        digest.update(
            tensor.detach()
            .cpu()
            .resolve_conj()
            .resolve_neg()
            .contiguous()
            .reshape(-1)
            .view(torch.uint8)
            .numpy()
            .data
        )
    return digest.hexdigest()
