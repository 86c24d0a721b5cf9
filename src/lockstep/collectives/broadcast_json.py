"""JSON and bytes that ranks send each other, never pickle. Groups must accept CPU tensors."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor

from lockstep.collectives.group import Group


def everybodys(mine: Any, group: Group, place: str) -> list[Any]:
    """Return every rank's value, by rank. A collective."""
    text = json.dumps(mine).encode()
    lengths = group.all_gather(torch.tensor([len(text)]), place).tolist()
    padded = torch.zeros(max(lengths), dtype=torch.uint8)
    padded[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    rows = group.all_gather(padded, place).view(len(lengths), -1)
    return [
        json.loads(row[:length].numpy().tobytes())
        for row, length in zip(rows, lengths, strict=True)
    ]


def said_by(root: int, mine: Any, group: Group, place: str) -> Any:
    """Return the value of rank `root` of the group, on all ranks. The others' `mine` is ignored. A
    collective.
    """
    return json.loads(
        bytes_of(root, json.dumps(mine).encode() if group.rank == root else b"", group, place)
    )


def bytes_of(root: int, mine: bytes, group: Group, place: str | None = None) -> bytes:
    """Return the bytes of rank `root` of the group, on all ranks. The others' `mine` is ignored. A
    collective.
    """
    here = group.rank == root
    length = torch.tensor(len(mine) if here else 0)
    group.broadcast(length, root, place).wait()
    if length == 0:
        return b""
    letters: Tensor = (
        torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        if here
        else torch.empty(int(length), dtype=torch.uint8)
    )
    group.broadcast(letters, root, place).wait()
    return letters.numpy().tobytes()
