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
    compressor: Compressor
    if compression.rank is not None:
        compressor = PowerSGD(group, compression.rank)
    elif compression.kind == "int8":
        compressor = Int8(group)
    else:
        compressor = Cast(group, torch.bfloat16 if compression.kind == "bf16" else torch.float16)
    return Compressed(compression, compressor, group)
