"""Replicas that must be equal: looked at after steps 1, 2 and every K, by one number a parameter.

The number is the sum of the bits, read as integers: any change of one element changes it, and equal replicas have equal numbers on
every machine. All numbers travel in one small all-gather; where two ranks differ, all ranks raise the same error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from lockstep.collectives.group import Group
from lockstep.collectives.tags import listed
from lockstep.errors import ReplicaDivergence

_WORD = 8  # bytes
CAUSES = "Usual causes: weights changed by hand on one rank; an own no_sync() or modulo around the step; a parameter that the other ranks do not train"


class ReplicaCheck:
    """Compares named tensors among the ranks of a group when it is due: after calls 1, 2 and every `every`."""

    def __init__(self, group: Group, every: int = 100) -> None:
        self._group = group
        self._every = every
        self.steps = 0

    def __call__(self, named: Callable[[], Iterable[tuple[str, Tensor]]]) -> None:
        """Count a step, and compare if it is time. All ranks call it. Raises ReplicaDivergence on all of them."""
        self.steps += 1
        if self.steps <= 2 or self.steps % self._every == 0:
            self.compare(list(named()), f"after step {self.steps}")

    @torch.no_grad()
    def compare(self, named: Sequence[tuple[str, Tensor]], when: str) -> None:
        if self._group.size == 1 or not named:
            return
        mine = torch.stack([checksum(tensor) for _, tensor in named])
        everyone = self._group.all_gather(mine, place="for the replica check").view(self._group.size, -1)
        differ = everyone != everyone[0]
        if not bool(differ.any()):
            return
        number = int(differ.any(0).nonzero()[0])
        name, tensor = named[number]
        ranks = differ[:, number].nonzero().flatten().tolist()
        gap = self._largest_gap(tensor)
        count = int(differ.any(0).sum())
        raise ReplicaDivergence(
            f"{when} {name!r} differs between rank 0 and {listed(ranks)} (max |difference| {gap:.2g}). "
            f"{count} of {len(named)} tensors differ. {CAUSES}.",
            name,
            ranks,
        )

    def _largest_gap(self, tensor: Tensor) -> float:
        first = tensor.detach().clone()
        self._group.broadcast(first, place="for the replica check").wait()
        gap = (first.double() - tensor.double()).abs().max() if tensor.numel() else torch.zeros((), dtype=torch.float64)
        self._group.all_reduce(gap, "max", place="for the replica check").wait()
        return float(gap)


def checksum(tensor: Tensor) -> Tensor:
    """The sum of a tensor's bits, read as 64-bit integers, modulo 2^64; int64, 0-d, on its device. Nothing is copied that is contiguous and aligned."""
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    octets = tensor.contiguous().reshape(-1).view(torch.uint8)
    if octets.storage_offset() % _WORD:
        octets = octets.clone()
    whole = octets.numel() - octets.numel() % _WORD
    found = octets[:whole].view(torch.int64).sum()
    if whole < octets.numel():  # the rest as one number too: the sum of its octets would be the same for many
        rest = torch.zeros(_WORD, dtype=torch.uint8, device=octets.device)
        rest[: octets.numel() - whole] = octets[whole:]
        found = found + rest.view(torch.int64)[0]
    return found
