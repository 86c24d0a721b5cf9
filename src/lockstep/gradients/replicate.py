"""Replicas begin equal: parameters and buffers go from rank 0 to all ranks, once."""

from __future__ import annotations

from itertools import chain

import torch
from torch import nn

from lockstep.collectives.group import Group


@torch.no_grad()
def replicate(module: nn.Module, group: Group) -> None:
    """Overwrite every parameter and buffer by rank 0's. Buffers too: BatchNorm statistics are part of the model."""
    named = chain(module.named_parameters(), module.named_buffers())
    for work in [group.broadcast(tensor.detach(), place=f"for {name} at the start") for name, tensor in named]:
        work.wait()
