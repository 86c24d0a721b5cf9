"""What ranks have to tell each other in bytes and in words: JSON, never pickle. Groups are such
whose tensors are on the CPU.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor

from lockstep.collectives.group import Group


def everybodys(mine: Any, group: Group, place: str) -> list[Any]:
    """What every rank of the group has to say, by rank. A collective."""
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
    """What rank `root` of the group has to say, on all of them; the others' `mine` is not looked
    at. A collective.
    """
    return json.loads(
        bytes_of(root, json.dumps(mine).encode() if group.rank == root else b"", group, place)
    )


def bytes_of(root: int, mine: bytes, group: Group, place: str | None = None) -> bytes:
    """The bytes of rank `root` of the group, on all of them; the others' are not looked at. A
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
