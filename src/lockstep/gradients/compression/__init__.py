"""Gradients in fewer bytes: cast, quantised or factored. Error feedback adds what was left out to
later steps.
"""

from __future__ import annotations

import torch

from lockstep.collectives.group import Group
from lockstep.config.parallelism import Compression
from lockstep.gradients.compression.compressed import Compressed, Compressor
from lockstep.gradients.compression.fewer_bits import Cast, Int8
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
    assert compression.rank is not None, compression
    return PowerSGD(group, compression.rank)


def owes(compression: Compression) -> bool:
    """Whether it remembers what it has left out, in the unit of the gradients."""
    return compression.kind in ("int8", "powersgd")
