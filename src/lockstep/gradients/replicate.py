"""Replicas begin equal: parameters and buffers go from rank 0 to all ranks, once."""

from __future__ import annotations

from itertools import chain

import torch
from torch import nn

from lockstep.collectives.group import Group


@torch.no_grad()
def replicate(module: nn.Module, group: Group) -> None:
    """Overwrite every parameter and buffer by rank 0's. Buffers too: BatchNorm statistics are part of the model."""
    for work in [group.broadcast(tensor.detach()) for tensor in chain(module.parameters(), module.buffers())]:
        work.wait()
