"""Which reduction a `Compression` names, and whether a model has anything that it could compress."""

from __future__ import annotations

import warnings

import torch
from torch import nn

from lockstep.collectives.group import Group
from lockstep.errors import LockstepWarning, UsageError
from lockstep.gradients.compression.cast import Cast
from lockstep.gradients.compression.int8 import Int8
from lockstep.gradients.compression.power_sgd import PowerSGD, matrix_of, pays
from lockstep.gradients.compression.reduction import Compressed, Way
from lockstep.gradients.compression.top_k import TopK
from lockstep.method import Compression


def compressed(compression: Compression, group: Group) -> Compressed:
    """On one rank too: what is lost and owed is the same, only nothing travels."""
    return Compressed(compression, _way(compression, group), group)


def _way(compression: Compression, group: Group) -> Way:
    match compression.kind:
        case "bf16":
            return Cast(group, torch.bfloat16)
        case "fp16":
            return Cast(group, torch.float16)
        case "int8":
            return Int8(group)
    assert compression.amount is not None, compression
    if compression.kind == "powersgd":
        return PowerSGD(group, int(compression.amount))
    assert compression.kind == "topk", compression
    return TopK(group, compression.amount)


def owes(compression: Compression) -> bool:
    """Whether it remembers what it has left out, in the unit of the gradients."""
    return compression.kind in ("int8", "powersgd", "topk")


def check_matrices(compression: Compression, model: nn.Module, rank: int) -> None:
    """Raise a UsageError where PowerSGD's factors would have more columns than any gradient has rows or columns; warn where none gets smaller."""
    if compression.kind != "powersgd":
        return
    assert compression.amount is not None
    columns = int(compression.amount)
    shapes = {name: shape for name, each in model.named_parameters() if each.requires_grad and (shape := matrix_of(each)) is not None}
    if not shapes:
        raise UsageError(f"compress='{compression}' makes two factors of a matrix, and no parameter of this model is one: choose bf16")
    name, shape = max(shapes.items(), key=lambda item: min(item[1]))
    if columns > min(shape):
        raise UsageError(
            f"compress='{compression}': factors of {columns} columns, and no matrix of this model has so many rows and columns; the largest that "
            f"way is {name!r}, {shape[0]} x {shape[1]}: choose a smaller rank, as in powersgd:{max(1, min(shape) // 8)}"
        )
    if rank == 0 and not any(pays(columns, each) for each in shapes.values()):
        warnings.warn(
            f"compress='{compression}' makes no gradient of this model smaller: everything travels as it is. Choose a smaller rank",
            LockstepWarning,
            stacklevel=2,
        )
