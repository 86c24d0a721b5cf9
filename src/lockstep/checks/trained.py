"""What replicas cannot train is refused before the first step, by name: tensors that nothing can
add up, that share memory, that lack a kernel.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lockstep.errors import UsageError


def check_trained(module: nn.Module, ignored: Collection[str] = ()) -> None:
    """Raise a UsageError for the first parameter, buffer or layer that replicas cannot train.
    `ignored` are full names.

    Frozen parameters and buffers are never added up as they are, but every rank gets those of rank
    0.
    """
    for name, parameter in module.named_parameters():
        if name in ignored or is_lazy(parameter):
            continue
        _check_memory(f"the parameter {name!r}", parameter, "nn.Parameter(tensor.clone())")
        if parameter.requires_grad and not adds_up(parameter.dtype):
            raise UsageError(
                "dtype-cannot-be-summed", parameter=name, dtype=_short(parameter.dtype)
            )
    for name, buffer in module.named_buffers():
        if name not in ignored:
            _check_memory(f"the buffer {name!r}", buffer, "tensor.clone()")
    on_cpu = all(parameter.device.type == "cpu" for parameter in module.parameters())
    for name, layer in module.named_modules():
        if on_cpu and isinstance(layer, nn.SyncBatchNorm):
            raise UsageError("sync-batch-norm-on-cpu", layer=name)


@cache
def adds_up(dtype: torch.dtype) -> bool:
    """Whether torch can add tensors of this dtype in place, as every reduction does. Of
    complex32 it says itself that it is experimental.
    """
    if dtype == torch.complex32:
        return False
    try:
        torch.zeros(2, dtype=dtype).add_(torch.zeros(2, dtype=dtype))
    except (NotImplementedError, RuntimeError):
        return False
    return True


def _check_memory(what: str, tensor: Tensor, instead: str) -> None:
    if tensor.layout != torch.strided:
        raise UsageError("sparse-tensor", tensor=what, layout=str(tensor.layout))
    if any(
        stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
    ):
        raise UsageError("expanded-tensor", tensor=what, shape=list(tensor.shape), instead=instead)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
