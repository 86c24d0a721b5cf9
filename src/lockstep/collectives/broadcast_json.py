"""JSON and bytes that ranks send each other, never pickle. Groups must accept CPU tensors."""

from __future__ import annotations

import json
from typing import Any

import torch

from lockstep.collectives.group import Group


def everybodys(local: Any, group: Group, call_site: str) -> list[Any]:
    """Return every rank's value, by rank. A collective."""
    text = json.dumps(local).encode()
    lengths = group.all_gather(torch.tensor([len(text)]), call_site).tolist()
    padded = torch.zeros(max(lengths), dtype=torch.uint8)
    padded[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    rows = group.all_gather(padded, call_site).view(len(lengths), -1)
    return [
        json.loads(row[:length].numpy().tobytes())
        for row, length in zip(rows, lengths, strict=True)
    ]


def said_by(root: int, local: Any, group: Group, call_site: str) -> Any:
    """Return the value of rank `root` of the group, on all ranks. The others' `local` is ignored. A
    collective.
    """
    text = json.dumps(local).encode() if group.rank == root else b""
    return json.loads(bytes_of(root, text, group, call_site))


def bytes_of(root: int, local: bytes, group: Group, call_site: str | None = None) -> bytes:
    """Return the bytes of rank `root` of the group, on all ranks. The others' `local` is ignored. A
    collective.
    """
    is_root = group.rank == root
    length = torch.tensor(len(local) if is_root else 0)
    group.broadcast(length, root, call_site).wait()
    if length == 0:
        return b""
    data = torch.empty(int(length), dtype=torch.uint8)
    if is_root:
        data = torch.frombuffer(bytearray(local), dtype=torch.uint8)
    group.broadcast(data, root, call_site).wait()
    return data.numpy().tobytes()
