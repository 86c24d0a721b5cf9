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
                f"the parameter {name!r} is {_short(parameter.dtype)}, which torch cannot add up,"
                " so that it has no gradient over ranks: keep it in bfloat16 or float32, or freeze"
                " it (requires_grad=False)"
            )
    for name, buffer in module.named_buffers():
        if name not in ignored:
            _check_memory(f"the buffer {name!r}", buffer, "tensor.clone()")
    on_cpu = all(parameter.device.type == "cpu" for parameter in module.parameters())
    for name, layer in module.named_modules():
        if on_cpu and isinstance(layer, nn.SyncBatchNorm):
            raise UsageError(
                f"the layer {name!r} is a SyncBatchNorm, which works on GPUs only, and the model is"
                " on the CPU: use BatchNorm"
            )


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
        raise UsageError(
            f"{what} is a sparse tensor ({tensor.layout}): only dense ones can be trained by"
            " replicas; use its to_dense()"
        )
    if any(
        stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
    ):
        raise UsageError(
            f"{what} was expanded to {list(tensor.shape)}: several of its elements are one place in"
            f" memory, which cannot be written to; give {instead}"
        )


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
