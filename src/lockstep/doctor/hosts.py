"""Several hosts: the same command on each, which meet through a store on the first and then talk in pairs.

every host    resolve all names, find out which one I am
first host    listens on its own address; waits for the others until the time is up, and says who has come
who has come  each opens a port and tries to reach everybody else's; then one process a host adds up, measures links, compares clocks
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from lockstep import meeting
from lockstep.collectives.background import Background
from lockstep.collectives.group import Group
from lockstep.doctor import host, links, network, software, sums
from lockstep.doctor.finding import Finding, judged
from lockstep.doctor.links import Link
from lockstep.doctor.one_host import Examined
from lockstep.errors import LockstepError, UsageError

_CONNECT_SECONDS = 3.0
_ANSWER_SECONDS = 5.0  # for the store to greet, where a connection was accepted
_MEASURE = timedelta(seconds=60)
_APART = 1.0  # seconds between two hosts' clocks from which logs and certificates become confusing


def examine(hosts: Sequence[str], port: int, seconds: float) -> Examined:
    """Look at this host and at its ways to the others, which must begin within `seconds` too. Raises UsageError for names that cannot be a set of hosts."""
    if len(hosts) < 2 or len(set(hosts)) < len(hosts):
        raise UsageError(f"HOSTS {' '.join(hosts)}: name at least two hosts, each once, in the same order on every host")
    addresses = {name: next(iter(network.addresses_of(name)), None) for name in hosts}
    me = which(hosts, addresses)
    found = [*software.findings(), *host.findings(1), *_names(hosts, addresses, me)]
    peer = next((address for name, address in addresses.items() if name != hosts[me] and address), None)
    own = (network.towards(peer) if peer else None) or addresses[hosts[me]] or "127.0.0.1"
    found.append(network.used(network.interfaces(), own, os.environ.get("GLOO_SOCKET_IFNAME")))
    try:
        with _store(hosts, addresses, me, own, port, seconds) as store:
            more, pairs = _together(store, hosts, me, own, seconds)
        return Examined([*found, *more], pairs)
    except _NotMet as error:
        return Examined([*found, error.finding], [])
    except dist.DistError as error:
        why = f"{hosts[me]} lost {hosts[0]}:{port} ({str(error).splitlines()[0]}): is it `lockstep doctor` that listens there, and does it still run?"
        return Examined([*found, judged("meeting", f"{hosts[0]}:{port}", fix=why)], [])


def which(hosts: Sequence[str], addresses: dict[str, str | None]) -> int:
    """The place of this host in the list. Raises UsageError where none of the addresses is its own, or more than one."""
    mine = [place for place, name in enumerate(hosts) if (address := addresses[name]) and network.is_local(address)]
    if len(mine) != 1:
        told = ", ".join(f"{name} is {addresses[name] or 'unknown'}" for name in hosts)
        what = "more than one of them is" if mine else "none of them is"
        raise UsageError(
            f"HOSTS: {what} this host ({told}); give each host's name or address on the network that the others reach, this one's too"
        )
    return mine[0]


def _names(hosts: Sequence[str], addresses: dict[str, str | None], me: int) -> list[Finding]:
    """Of this host itself, and of all that were given."""
    found = [network.own_name(socket.gethostname(), network.addresses_of, several_hosts=True)]
    unknown = [name for name in hosts if addresses[name] is None]
    value = ", ".join(f"{name} {addresses[name] or '?'}" for name in hosts)
    fix = f"{' and '.join(unknown)} cannot be resolved on {hosts[me]}: correct the name, or add it to /etc/hosts" if unknown else ""
    return [*found, judged("hosts", f"{value}; this is {hosts[me]}", fix=fix)]


class _NotMet(Exception):
    def __init__(self, finding: Finding) -> None:
        super().__init__(finding.fix)
        self.finding = finding


@contextmanager
def _store(hosts: Sequence[str], addresses: dict[str, str | None], me: int, own: str, port: int, seconds: float) -> Iterator[dist.Store]:
    """The store on the first host; the one who hosts it leaves last."""
    patience = timedelta(seconds=seconds + 10)
    first, where = hosts[0], addresses[hosts[0]]
    if me == 0:
        try:
            listener = socket.create_server((own, port))
        except OSError as error:
            why = f"port {port} of {own} cannot be listened on ({os.strerror(error.errno or 0)}): end what uses it (`ss -ltnp`), or give another --port"
            raise _NotMet(judged("meeting", f"{first}:{port}", fix=why)) from None
        store = dist.TCPStore(own, port, is_master=True, wait_for_workers=False, timeout=patience, master_listen_fd=listener.detach())
        yield store
        return
    if where is None:
        raise _NotMet(judged("meeting", f"{first}:{port}", fix=f"{first} cannot be resolved on {hosts[me]}, so nothing can be asked of it"))
    if why := network.try_to_reach(where, port, seconds):
        told = f"{hosts[me]} cannot reach {first} ({where}:{port}) within {seconds:g} s: {why}; start the same command there, and let the port through"
        raise _NotMet(judged("meeting", f"{first}:{port}", fix=told))
    # On a thread: where another program has taken the connection and says nothing, the constructor waits far longer than its timeout.
    joining = Background("lockstep doctor").submit(
        lambda: dist.TCPStore(where, port, is_master=False, wait_for_workers=False, timeout=patience)
    )
    try:
        store = joining.result(_ANSWER_SECONDS)
    except TimeoutError:
        told = f"what listens at {first} ({where}:{port}) is not `lockstep doctor`: end it (`ss -ltnp` there), or give all hosts another --port"
        raise _NotMet(judged("meeting", f"{first}:{port}", fix=told)) from None
    yield store


def _together(store: dist.Store, hosts: Sequence[str], me: int, own: str, seconds: float) -> tuple[list[Finding], list[Link]]:
    """Everything that takes more than one host."""
    present = _who_is_here(store, hosts, me, seconds)
    missing = [name for place, name in enumerate(hosts) if place not in present]
    fix = (
        f"{' and '.join(missing)} did not come within {seconds:g} s: start the same command there, and look whether {hosts[0]} can be reached"
        if missing
        else ""
    )
    found = [judged("meeting", f"{len(present)} of {len(hosts)} hosts, at {hosts[0]}", fix=fix)]
    pairs: list[Link] = []
    try:
        if len(present) > 1:
            closed = _closed_ways(store, hosts, present, me, own)
            fix = "; ".join(f"{source} cannot open a connection to {target}: {why}" for source, target, why in closed)
            found.append(
                judged(
                    "ports",
                    f"{len(present) * (len(present) - 1)} ways tried",
                    fix=f"{fix}; let the hosts' firewalls pass all ports among them" if fix else "",
                )
            )
            if not closed:
                more, pairs = _measured(store, [hosts[place] for place in present], present.index(me), own)
                found += more
    finally:
        _leave(store, me, len(present))
    return found, pairs


def _who_is_here(store: dist.Store, hosts: Sequence[str], me: int, seconds: float) -> list[int]:
    """Places of the hosts that came in time: the first host decides, for all."""
    store.set(f"here/{me}", "1")
    if me == 0:
        deadline = time.monotonic() + seconds
        while not all(store.check([f"here/{place}"]) for place in range(len(hosts))) and time.monotonic() < deadline:
            time.sleep(0.05)
        store.set("present", json.dumps([place for place in range(len(hosts)) if store.check([f"here/{place}"])]))
    present = [int(place) for place in json.loads(store.get("present"))]
    if me not in present:
        raise _NotMet(
            judged(
                "meeting",
                f"{hosts[0]}",
                fix=f"{hosts[me]} came after {hosts[0]} had stopped waiting: start the command on all hosts within {seconds:g} s",
            )
        )
    return present


def _closed_ways(store: dist.Store, hosts: Sequence[str], present: Sequence[int], me: int, own: str) -> list[tuple[str, str, str]]:
    """(from, to, why) for every pair of hosts between which no connection can be opened."""
    with socket.create_server((own, 0), backlog=len(hosts)) as server:
        store.set(f"port/{me}", json.dumps(server.getsockname()[:2]))
        mine = []
        for place in present:
            if place != me:
                address, port = json.loads(store.get(f"port/{place}"))
                if why := network.try_to_reach(address, port, _CONNECT_SECONDS):
                    mine.append((hosts[me], hosts[place], f"{address}:{port}, {why}"))
        store.set(f"closed/{me}", json.dumps(mine))
        return [(source, target, why) for place in present for source, target, why in json.loads(store.get(f"closed/{place}"))]


def _measured(store: dist.Store, names: Sequence[str], rank: int, own: str) -> tuple[list[Finding], list[Link]]:
    """One process a host, over gloo, as training between them would begin."""
    interface = next((name for name, address in network.interfaces().items() if address == own), None)
    if interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    try:
        dist.init_process_group("gloo", store=dist.PrefixStore("group", store), rank=rank, world_size=len(names), timeout=_MEASURE)
        assert dist.group.WORLD is not None
        group, device = Group.of(dist.group.WORLD), torch.device("cpu")
        try:
            bad = sums.wrong(group, device, ["native"])
            pairs = links.measure(group, names, device)
            offsets = clocks(group)
            group.all_reduce(torch.zeros(1)).wait()  # nobody leaves before all have what they need
        finally:
            group.forget()
            dist.destroy_process_group()
    except RuntimeError as error:
        why = f"the hosts reach each other's ports, but gloo fails ({str(error).splitlines()[0]}): is GLOO_SOCKET_IFNAME right on all?"
        return [judged("sums", "not done", fix=why)], []
    return [
        sums.judge(bad, ["native"], len(names), "host"),
        links.judge(pairs, hosts=True),
        judge_clocks(dict(zip(names, offsets, strict=True))),
    ], pairs


def clocks(group: Group) -> list[float]:
    """By how many seconds each rank's clock is ahead of rank 0's: the best of ten questions. All members call it."""
    offsets = torch.zeros(group.size, dtype=torch.float64)
    for rank in range(1, group.size):
        answer, best = torch.zeros(1, dtype=torch.float64), float("inf")
        for _ in range(10):
            if group.rank == 0:
                asked = time.time()
                group.send(answer, rank)
                group.receive(answer, rank)
                trip = time.time() - asked
                if trip < best:
                    best, offsets[rank] = trip, answer.item() - asked - trip / 2
            elif group.rank == rank:
                group.receive(answer, 0)
                group.send(torch.tensor([time.time()], dtype=torch.float64), 0)
    group.all_reduce(offsets).wait()
    return [float(each) for each in offsets]


def judge_clocks(offsets: dict[str, float]) -> Finding:
    """Seconds ahead of the first host, by name."""
    value = ", ".join(f"{name} {1e3 * each:+.1f} ms" for name, each in list(offsets.items())[1:])
    apart = [f"{name} by {each:+.1f} s" for name, each in offsets.items() if abs(each) > _APART]
    warn = (
        f"clocks differ from {next(iter(offsets))}'s, {' and '.join(apart)}: have chrony or ntpd set them, or logs of different hosts cannot be compared"
        if apart
        else ""
    )
    return judged("clocks", value, warn=warn)


def _leave(store: dist.Store, me: int, count: int) -> None:
    """The first host's store goes when it leaves: it waits for the others, a moment."""
    try:
        store.add("left", 1)
        if me == 0:
            meeting.wait_for_count(store, "left", count, timedelta(seconds=10))
    except (dist.DistError, LockstepError):
        pass  # a host that has died is not waited for longer
