"""Replicas begin equal: parameters and buffers go from rank 0 to all ranks, once."""

from __future__ import annotations

from collections.abc import Collection
from itertools import chain

import torch
from torch import nn

from lockstep.collectives.group import Group


@torch.no_grad()
def replicate(module: nn.Module, group: Group, ignored: Collection[str] = (), root: int = 0, *, buffers: bool = True) -> None:
    """Overwrite every parameter and buffer by those of rank `root`. Buffers too: BatchNorm statistics are part of the model."""
    named = chain(module.named_parameters(), module.named_buffers() if buffers else ())
    for work in [group.broadcast(tensor.detach(), root, f"for {name} to be equal") for name, tensor in named if name not in ignored]:
        work.wait()
