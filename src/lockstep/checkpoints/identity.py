"""One SHA-256 of a model's weights, which two runs can compare and which can be computed again from
a checkpoint's file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.checkpoints.pieces import storable
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


def check_storable(model: nn.Module) -> None:
    """Raise TaskError, with name and dtype, for a tensor that a checkpoint cannot hold. Call it
    before training, not after it.
    """
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    for name, tensor in weights(model).items():
        if tensor.is_quantized:
            problem = "quantized"
            instead = "make it dense"
        elif tensor.layout is not torch.strided:
            problem = f"in layout {tensor.layout}"
            instead = "make it dense"
        elif not storable(tensor.dtype):
            problem = f"of dtype {tensor.dtype}"
            instead = "use another dtype"
        else:
            continue
        kind = "parameter"
        if name not in parameters:
            kind = "buffer"
            instead += ", or register it with persistent=False"
        raise TaskError(
            "tensor-not-storable", tensor=f"{kind} {name}", what=problem, instead=instead
        )


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


def config_of(model: nn.Module) -> dict[str, Any] | None:
    """Return what `save_pretrained` of transformers would write into config.json; None if `model`
    is not one of its models.
    """
    kinds = {f"{kind.__module__}.{kind.__qualname__}" for kind in type(model).__mro__}
    if "transformers.modeling_utils.PreTrainedModel" not in kinds:
        return None
    config: Any = model.config
    name = type(model).__name__.removeprefix("FSDP")  # of the classes that fully_shard makes
    return {**json.loads(config.to_json_string()), "architectures": [name]}


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
