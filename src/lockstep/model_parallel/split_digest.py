"""Which weights are these, where no rank has them all: the SHA-256 that one process would
compute (checkpoints/identity.py).
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection

import torch
from torch import Tensor

from lockstep.checkpoints.identity import weights
from lockstep.checkpoints.pieces import TensorPiece
from lockstep.collectives.group import Group
from lockstep.collectives.texts import said_by
from lockstep.model_parallel.local import Locals
from lockstep.model_parallel.mesh_devices import Axes

_NONE = -1


def sha256(here: Locals, axes: Axes, names: Collection[str]) -> str:
    """64 hexadecimal digits, on every rank. All ranks of a replica (`axes.model`) call it.

    The tensors come to its first rank one after the other, by sorted name; no rank has more than
    one of them whole at a time. `names` are those of the whole model (`weights(model)` before it
    was cut): of a tensor that has several names in several stages, only one counts.
    """
    mine = weights(here.module)
    digest = hashlib.sha256()
    for name in sorted(names):
        pieces = here.pieces("", name, mine[name], axes.tensor) if name in mine else []
        for octets in _arriving(axes.model.host, pieces):
            digest.update(octets.numpy().data)
    found: str = said_by(0, digest.hexdigest(), axes.model.host, "for the weights' SHA-256")
    return found


def _arriving(group: Group, pieces: list[TensorPiece]) -> list[Tensor]:
    """One tensor's bytes on the group's first rank, in order, from whoever has them; nothing on
    the others.
    """
    assert len(pieces) <= 1, "a rank holds one interval of a tensor"
    octets = [
        each.data.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for each in pieces
    ]
    told = torch.tensor([pieces[0].start, len(octets[0])] if pieces else [_NONE, 0])
    table = group.all_gather(told, place="for the weights' SHA-256").view(-1, 2).tolist()
    parts: dict[int, Tensor] = {}
    for rank, (start, size) in sorted(enumerate(table), key=lambda row: row[1]):
        if start == _NONE or start in parts:  # nothing, or what another stage has too
            continue
        parts[start] = octets[0] if rank == group.rank else torch.empty(size, dtype=torch.uint8)
        if size and rank != 0 and group.rank == 0:
            group.receive(parts[start], rank)
        elif size and rank == group.rank != 0:
            group.send(parts[start], 0)
    return list(parts.values()) if group.rank == 0 else []
