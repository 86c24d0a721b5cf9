"""What a world gives to each of its groups: fingerprints, the shared memory of its host, a twin for
CPU tensors, and the thresholds by which algorithms are chosen.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Literal, Protocol, TypeVar

import torch
import torch.distributed as dist

from lockstep.collectives.exchanged_fingerprints import ExchangedFingerprints
from lockstep.collectives.group import Group, Hosts
from lockstep.collectives.shared_memory.operations import possible
from lockstep.collectives.shared_memory.segment import this_host
from lockstep.errors import UsageError
from lockstep.runtime.environment import Placement
from lockstep.world.rendezvous import loopback

Tagging = Literal["host", "all", "off"]


class Closable(Protocol):
    def close(self) -> None: ...


C = TypeVar("C", bound=Closable)


class WorldGroups:
    """Makes a world's groups and sets them up. Every member of a group makes the same calls.

    `subgroup(ranks)` makes a group of world ranks.
    """

    def __init__(
        self,
        store: dist.Store,
        placement: Placement,
        device: torch.device,
        *,
        timeout: timedelta,
        tags: Tagging,
        subgroup: Callable[[Sequence[int]], Group],
    ) -> None:
        self.made: list[Group] = []
        """All groups that were set up, including twins."""
        self._store = store
        self._device = device
        self._local_size = placement.local_size
        self._node = placement.node
        self.on_one_host = placement.local_size == placement.size
        self._timeout = timeout
        self._tags = tags
        self._subgroup = subgroup
        self._turns: dict[str, int] = {}  # number of groups made so far, by ranks
        self._hosts_of: dict[Group, Hosts | None] = {}

    def make(self, ranks: Sequence[int], rank: int) -> Group:
        """Make a group of `ranks`, numbered as in the whole world. Only its members call this; this
        process is `rank`.
        """
        self._same_number_of_groups(ranks, rank)
        with loopback(self.on_one_host):
            group = dist.new_group(ranks, use_local_synchronization=True, sort_ranks=False)
        assert group is not None
        return self.set_up(Group.of(group))

    def set_up(self, group: Group) -> Group:
        """Set up a group that exists already."""
        self.made.append(group)
        group.within = dist.group.WORLD
        first = group.ranks[0] // self._local_size
        on_first_node = [rank for rank in group.ranks if rank // self._local_size == first]
        group.ranks_per_node = len(on_first_node)
        group.find_hosts = lambda: self._hosts(group)
        self._compare(group, tensors=self._device.type == "cpu")
        self._have_twin(group)
        return group

    def twin(self, group: Group, timeout: timedelta | None = None) -> dist.ProcessGroup:
        """Return another process group of the same ranks, over gloo."""
        with loopback(self.on_one_host):
            twin: dist.ProcessGroup | None = dist.new_group(
                list(group.ranks),
                timeout=timeout,
                backend="gloo",
                use_local_synchronization=True,
                sort_ranks=False,
            )
        assert twin is not None
        return twin

    def _same_number_of_groups(self, ranks: Sequence[int], rank: int) -> None:
        """Raise UsageError unless all members have made the same number of groups. torch names a
        group by its ranks and that number: if it differs, the members wait without end.
        """
        count = len(dist.distributed_c10d._world.pg_names)
        key = f"subgroup/{'-'.join(map(str, ranks))}"
        turn = self._turns.get(key, 0) + 1
        self._turns[key] = turn
        self._store.set(f"{key}/{turn}/{rank}", str(count))
        counts = {member: int(self._store.get(f"{key}/{turn}/{member}")) for member in ranks}
        if len(set(counts.values())) > 1:
            raise UsageError("subgroups-out-of-step", ranks=list(ranks), counts=counts)

    def _hosts(self, group: Group) -> Hosts | None:
        """Return the group's hosts, which are found once for each group. None on one host, with
        tensors that are not on the CPU, and without tags.
        """
        if self.on_one_host or group.size == 1:
            return None
        if self._device.type != "cpu" or self._tags == "off":
            return None
        if group not in self._hosts_of:
            self._hosts_of[group] = find_hosts(group, self._node, self._subgroup)
        return self._hosts_of[group]

    def _compare(self, group: Group, *, tensors: bool) -> None:
        """Have every collective of the group compared before it starts: on a page of memory if all
        ranks are on one host. `tensors`: whether its tensors are on the CPU; then they go through
        that memory too.
        """
        group.waits = tensors
        before = group.opened
        group.opened = True
        if before or group.size == 1 or self._tags == "off":
            return
        name = group.process_group.group_name
        store = dist.PrefixStore(f"host/{name}", self._store)
        group.share_host(store, self._timeout, node=self._node, tensors=tensors)
        if self._tags == "all" and not group.fingerprints.compares:
            group.fingerprints = ExchangedFingerprints(
                self._store, name, self.twin(group), group.ranks, self._timeout
            )
        if group.fingerprints.compares:
            group.timeout = self._timeout

    def _have_twin(self, group: Group) -> None:
        """On GPUs, give the group a twin for CPU tensors."""
        if self._device.type == "cpu" or group.host is not group:
            return
        group.host = Group.of(self.twin(group))
        group.host.within = group.within
        self.made.append(group.host)
        self._compare(group.host, tensors=True)


_UNABLE = 0  # stands for a rank that cannot share memory


def find_hosts(group: Group, node: int, subgroup: Callable[[Sequence[int]], Group]) -> Hosts | None:
    """Return the group's ranks by host. None if there is one host, one rank on each host, or a rank
    that cannot share memory. Every member calls it.

    `subgroup(ranks)` makes a group of world ranks. Ranks that the launcher places on different
    nodes count as ranks on different hosts.
    """
    local_number = _UNABLE
    if possible():
        digest = hashlib.sha256(f"{node} {this_host()}".encode()).digest()
        local_number = 1 + int.from_bytes(digest[:8], "big") // 4  # 62 bits, and never _UNABLE
    gathered = group.all_gather(
        torch.tensor([local_number]), place="to find out which ranks share a host"
    )
    ranks_by_host: dict[int, list[int]] = {}
    for rank, number in zip(group.ranks, gathered.tolist(), strict=True):
        ranks_by_host.setdefault(number, []).append(rank)
    counts = {len(ranks) for ranks in ranks_by_host.values()}
    if _UNABLE in ranks_by_host or len(ranks_by_host) == 1 or max(counts) == 1:
        return None
    owners = min(counts) if len(counts) == 1 else 1
    local_ranks = ranks_by_host[local_number]
    local = subgroup(local_ranks)
    partners = [local_ranks[local.rank]]
    if local.rank < owners:
        partners = [ranks[local.rank] for ranks in ranks_by_host.values()]
    return Hosts(local, subgroup(partners), owners)
