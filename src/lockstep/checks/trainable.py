"""Refuses, by name and before the first step, what replicas cannot train: models, optimizers and
losses; tensors that cannot be added up, that share memory, or that lack a kernel.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lockstep.errors import UsageError


def check_kinds(model: object, optimizer: object) -> None:
    """Raise UsageError unless `model` is a module that torch has not wrapped, and `optimizer` can
    train it.
    """
    if not isinstance(model, nn.Module) or not isinstance(optimizer, Optimizer):
        raise UsageError(
            "not-a-model-and-optimizer",
            model=type(model).__name__,
            optimizer=type(optimizer).__name__,
        )
    if needs_closure(optimizer):
        raise UsageError("optimizer-needs-closure", optimizer=type(optimizer).__name__)
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise UsageError("optimizer-needs-sparse-gradients")
    for name, module in model.named_modules():
        if isinstance(module, nn.parallel.DistributedDataParallel):
            raise UsageError(
                "already-wrapped", module=f"the model's {name!r}" if name else "the model"
            )


def needs_closure(optimizer: Optimizer) -> bool:
    """Whether the optimizer's `step` cannot be called without arguments. The class is asked,
    because a scheduler replaces the instance's `step`. `lockstep.prepare` gives it a closure.
    """
    if hasattr(optimizer.step, "prepared"):
        return False
    try:
        inspect.signature(type(optimizer).step).bind(optimizer)
    except TypeError:
        return True
    except ValueError:  # a builtin without a signature
        pass
    return False


def check_trained(module: nn.Module, device: torch.device, ignored: Collection[str] = ()) -> None:
    """Raise UsageError for the first parameter, buffer or layer that replicas cannot train.
    `device` is the world's, `ignored` are full names.

    Frozen parameters and buffers are not summed over the ranks, but every rank gets those of rank
    0.
    """
    for name, parameter in module.named_parameters():
        if name in ignored:
            continue
        if is_lazy(parameter):
            raise UsageError("lazy-parameter", parameter=name)
        kinds = {parameter.device.type, device.type}
        if len(kinds) > 1 and kinds <= {"cpu", "cuda"}:
            raise UsageError(
                "model-off-the-world",
                parameter=name,
                device=str(parameter.device),
                world=str(device),
            )
        _check_memory(f"the parameter {name!r}", parameter, "nn.Parameter(tensor.clone())")
        if parameter.requires_grad and not adds_up(parameter.dtype):
            dtype = str(parameter.dtype).removeprefix("torch.")
            raise UsageError("dtype-cannot-be-summed", parameter=name, dtype=dtype)
    for name, buffer in module.named_buffers():
        if name not in ignored:
            _check_memory(f"the buffer {name!r}", buffer, "tensor.clone()")
    on_cpu = all(parameter.device.type == "cpu" for parameter in module.parameters())
    for name, layer in module.named_modules():
        if on_cpu and isinstance(layer, nn.SyncBatchNorm):
            raise UsageError("sync-batch-norm-on-cpu", layer=name)


@cache
def adds_up(dtype: torch.dtype) -> bool:
    """Whether torch can add tensors of this dtype in place, as every reduction does. complex32 is
    refused: torch itself warns that it is experimental.
    """
    if dtype == torch.complex32:
        return False
    try:
        torch.zeros(2, dtype=dtype).add_(torch.zeros(2, dtype=dtype))
    except (NotImplementedError, RuntimeError):
        return False
    return True


def _check_memory(name: str, tensor: Tensor, instead: str) -> None:
    if tensor.layout != torch.strided:
        raise UsageError("sparse-tensor", tensor=name, layout=str(tensor.layout))
    dims = zip(tensor.stride(), tensor.shape, strict=True)
    if any(stride == 0 and size > 1 for stride, size in dims):
        raise UsageError("expanded-tensor", tensor=name, shape=list(tensor.shape), instead=instead)
