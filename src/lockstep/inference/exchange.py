"""Bytes and texts from rank to rank, through collectives: what some ranks know and all of them need. Nothing is pickled."""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.world import World


def from_first(text: str, world: World) -> str:
    """Rank 0's text, on every rank. A collective."""
    return _broadcast(text.encode(), 0, world).decode()


def from_all(mine: bytes, world: World) -> list[bytes]:
    """Every rank's bytes, by rank, on every rank. A collective."""
    return [_broadcast(mine, rank, world) for rank in range(world.size)]


def _broadcast(mine: bytes, root: int, world: World) -> bytes:
    here = world.rank == root
    length = torch.tensor(len(mine) if here else 0)
    world.control.broadcast(length, root).wait()
    if length == 0:
        return b""
    letters: Tensor = torch.frombuffer(bytearray(mine), dtype=torch.uint8) if here else torch.empty(int(length), dtype=torch.uint8)
    world.control.broadcast(letters, root).wait()
    return letters.numpy().tobytes()
