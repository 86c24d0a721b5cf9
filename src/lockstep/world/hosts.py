"""Which ranks of a group share a host, found out by asking every one of them: what launchers say
of it is not always so.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import torch

from lockstep.collectives.group import Group, Hosts
from lockstep.collectives.shared_memory.operations import possible
from lockstep.collectives.shared_memory.segment import this_host

_UNABLE = 0  # of a rank that cannot share memory with anybody


def find_hosts(
    group: Group, node: int, subgroup: Callable[[Sequence[int], bool], Group]
) -> Hosts | None:
    """The group's ranks by host; None where that is of no use: one host, or one rank on each. Every
    member calls it.

    `subgroup(ranks, one_host)` makes a group of world ranks. Ranks that the launcher says to be on
    different nodes are, for us, on different hosts.
    """
    mine = torch.tensor([_number_of(node) if possible() else _UNABLE])
    numbers: list[int] = group.all_gather(
        mine, place="to find out which ranks share a host"
    ).tolist()
    members = {
        number: [rank for rank, other in zip(group.ranks, numbers, strict=True) if other == number]
        for number in numbers
    }
    counts = {len(ranks) for ranks in members.values()}
    if _UNABLE in members or len(members) == 1 or max(counts) == 1:
        return None
    owners = min(counts) if len(counts) == 1 else 1
    here = members[numbers[group.rank]]
    local = subgroup(here, True)
    partners = (
        [ranks[local.rank] for ranks in members.values()]
        if local.rank < owners
        else [here[local.rank]]
    )
    return Hosts(local, subgroup(partners, False), owners)


def _number_of(node: int) -> int:
    """Of this host, in 62 bits, and never that of being unable."""
    return (
        1
        + int.from_bytes(hashlib.sha256(f"{node} {this_host()}".encode()).digest()[:8], "big") // 4
    )
