"""Bytes and texts from rank to rank, through collectives: what some ranks know and all of them need. Nothing is pickled."""

from __future__ import annotations

from lockstep.collectives.texts import bytes_of
from lockstep.world import World


def from_first(text: str, world: World) -> str:
    """Rank 0's text, on every rank. A collective."""
    return bytes_of(0, text.encode(), world.control).decode()


def from_all(mine: bytes, world: World) -> list[bytes]:
    """Every rank's bytes, by rank, on every rank. A collective."""
    return [bytes_of(rank, mine, world.control) for rank in range(world.size)]
