"""Links with a delay between network namespaces: a process reads every packet that leaves a host, and
writes it to its receiver when it is due. Each host has a TUN device, whose other end the process
holds; the packets are as large as IP allows, so that there are few of them.

A packet leaves when those of its host before it have left, at the link's rate, and arrives when
those before it have arrived at its receiver's, a delay later. What would wait longer than a fifth of
a second is dropped, as by a switch whose memory is full.
"""

from __future__ import annotations

import fcntl
import heapq
import os
import select
import signal
import struct
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

_TUNSETIFF, _TUN, _NO_INFO = 0x400454CA, 0x0001, 0x1000  # linux/if_tun.h
_MTU = 65535  # bytes
_LONGEST_WAIT = 0.2  # seconds


class Host(Protocol):
    @property
    def namespace(self) -> str: ...
    @property
    def address(self) -> str: ...


@contextmanager
def carried(hosts: Sequence[Host], device: str, rate: float, delay: float) -> Iterator[None]:
    """Join these hosts in the block. A process of its own carries the packets.

    Args:
        hosts: namespaces that exist, and the address that each will have.
        device: the name of the interface in each.
        rate: bits per second of a host's link, in each direction.
        delay: seconds.
    """
    ends = []
    for number, host in enumerate(hosts):
        end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        ends.append(end)
        name = f"lsw{os.getpid()}n{number}"[-15:]
        fcntl.ioctl(end, _TUNSETIFF, struct.pack("16sH", name.encode(), _TUN | _NO_INFO))
        _ip("link", "set", name, "netns", host.namespace)
        _ip("-n", host.namespace, "link", "set", name, "name", device, "mtu", str(_MTU))
    carrier = os.fork()
    if carrier == 0:
        by_address = {
            bytes(map(int, host.address.split("."))): number for number, host in enumerate(hosts)
        }
        try:
            carry(ends, by_address, rate, delay)
        finally:  # what the caller does after its block is not for this process
            os._exit(1)
    for end in ends:
        os.close(end)
    try:
        yield
    finally:
        os.kill(carrier, signal.SIGKILL)
        os.waitpid(carrier, 0)


def carry(ends: Sequence[int], by_address: dict[bytes, int], rate: float, delay: float) -> None:
    """Carry packets for ever. `ends`: the TUN devices, `by_address`: the number of each host's."""
    # a link is not slower when its hosts are busy
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    numbers = {end: number for number, end in enumerate(ends)}
    leaves = [0.0] * len(ends)  # when the last packet of each host has left
    arrives = [0.0] * len(ends)  # when the last packet for each host has arrived
    waiting: list[tuple[float, int, int, bytes]] = []
    order = 0
    poll = select.poll()
    for end in ends:
        poll.register(end, select.POLLIN)
    while True:
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            _, _, receiver, packet = heapq.heappop(waiting)
            try:
                os.write(ends[receiver], packet)
            except OSError:  # its queue is full: lost
                continue
        patience = max(0.0, 1000 * (waiting[0][0] - now)) if waiting else None
        # poll counts whole milliseconds: the last one is spent asking
        for end, _ in poll.poll(None if patience is None else int(patience)):
            packet = os.read(end, _MTU)
            number = by_address.get(packet[16:20])
            if packet[0] >> 4 != 4 or number is None:  # not IPv4, or for nobody
                continue
            sender = numbers[end]
            now = time.monotonic()
            if max(leaves[sender], arrives[number]) > now + delay + _LONGEST_WAIT:
                continue
            seconds = 8 * len(packet) / rate
            leaves[sender] = max(leaves[sender], now) + seconds
            arrives[number] = max(arrives[number] + seconds, leaves[sender] + delay)
            order += 1
            heapq.heappush(waiting, (arrives[number], order, number, packet))


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)
