"""Gradients in fewer bytes: cast, quantised, factored, or only the largest elements. Error feedback
adds what was left out to later steps.
"""

from __future__ import annotations

import torch

from lockstep.collectives.group import Group
from lockstep.config.parallelism import Compression
from lockstep.gradients.compression.compressed import Compressed, Compressor
from lockstep.gradients.compression.fewer_bits import Cast, Int8, TopK
from lockstep.gradients.compression.power_sgd import PowerSGD


def compressed(compression: Compression, group: Group) -> Compressed:
    """Return the reduction that `compression` names. It also compresses on one rank, where nothing
    travels: what is lost and owed is the same.
    """
    return Compressed(compression, _compressor(compression, group), group)


def _compressor(compression: Compression, group: Group) -> Compressor:
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
