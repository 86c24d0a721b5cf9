"""Reduce operations: which there are, what torch and c10d call them, and for which dtypes each has
a meaning.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.config.knob import chosen
from lockstep.errors import UsageError

Op = Literal["sum", "mean", "max", "min", "prod"]

REDUCE_OPS = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "prod": dist.ReduceOp.PRODUCT,
}

OF_TORCH: dict[Any, Op] = {
    dist.ReduceOp.SUM: "sum",
    dist.ReduceOp.AVG: "mean",
    dist.ReduceOp.MAX: "max",
    dist.ReduceOp.MIN: "min",
    dist.ReduceOp.PRODUCT: "prod",
}

COMBINE: dict[str, Callable[..., Tensor]] = {
    "sum": torch.add,
    "mean": torch.add,  # divided once, at the end
    "prod": torch.mul,
    "max": torch.maximum,
    "min": torch.minimum,
}


def check_op(op: str, tensor: Tensor) -> None:
    """Raise a UsageError for an unknown operation, and for one that has no meaning for the
    dtype.
    """
    reduced_dtype(op, tensor.dtype, tensor.layout)


@lru_cache(maxsize=128)
def reduced_dtype(op: str, dtype: torch.dtype, layout: torch.layout) -> torch.dtype:
    """Return the dtype in which backends reduce a tensor of `dtype`. Raises as `check_op`."""
    chosen("op", op, REDUCE_OPS)
    name = str(dtype).removeprefix("torch.")
    if op == "mean" and not (dtype.is_floating_point or dtype.is_complex):
        raise UsageError("mean-of-integers", dtype=name)
    if op in ("max", "min") and dtype.is_complex:
        raise UsageError("op-of-complex", op=op, dtype=name)
    if dtype == torch.bool and op not in ("max", "min"):
        raise UsageError("op-of-bool", op=op)
    if layout != torch.strided:
        raise UsageError("op-of-sparse", op=op)
    if dtype not in _WORKING and dtype not in _WIDER:
        raise UsageError("op-of-dtype", op=op, dtype=name)
    return _WIDER.get(dtype, dtype)


def check_rows(tensor: Tensor) -> None:
    """Raise a UsageError for a 0-d tensor, which a reduce-scatter cannot cut."""
    if not tensor.dim():
        raise UsageError("collective-without-rows")


_WORKING = {
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
    torch.complex64,
    torch.complex128,
}
_WIDER = {torch.bool: torch.uint8, torch.int16: torch.int32}


def working_dtype(tensor: Tensor) -> torch.dtype:
    """Return the dtype in which backends reduce a tensor: its own if they support it, else a
    replacement.
    """
    return _WIDER.get(tensor.dtype, tensor.dtype)
