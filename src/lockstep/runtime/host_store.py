"""The store through which the ranks of one host find each other: other users of the host can
neither read nor write it.

torch's TCPStore asks nobody who they are, and every local user can connect to a loopback port. So
the store itself listens behind a packet filter that drops everybody, and a gate listens where the
ranks connect to. The gate asks the kernel which user owns the other end of a connection, and passes
on what this user's processes say; torch's own clients notice nothing.

    rank --- 127.0.0.1:PORT, the gate --- 127.0.0.2:PORT, behind the filter: TCPStore

The filter lets only those connections in that the gate is opening. Linux only: elsewhere the store
listens on loopback without a gate.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import socket
import struct
import sys
import threading
from collections.abc import Iterable
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch.distributed as dist

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import psutil

from lockstep.errors import LockstepError, PeerFailed

_LOOPBACK, _BEHIND = "127.0.0.1", "127.0.0.2"
_ATTACH_FILTER = 26  # SO_ATTACH_FILTER, which Python does not name
# classic BPF (linux/filter.h); a TCP listener's packets begin at the TCP header
_LOAD_SOURCE_PORT = (0x28, 0, 0, 0)
_IF_NOT_SKIP_ONE = 0x15, 0, 1
_PASS, _DROP = (0x06, 0, 0, 0xFFFFFFFF), (0x06, 0, 0, 0)
_PIECE = 2**16  # bytes that are read at once


class HostStore:
    """A key-value store in this process for the ranks of this host, until closed. `port` is on
    127.0.0.1.
    """

    def __init__(self, size: int | None = None, timeout: timedelta = timedelta(minutes=5)) -> None:
        import torch.distributed as dist

        listener, self.port = _listen(_LOOPBACK, 0), 0
        self.port = listener.getsockname()[1]
        self._gate: _Gate | None = None
        if sys.platform == "linux":
            self._gate = _Gate(listener, hidden := _listen(_BEHIND, self.port, nobody=True))
            self._gate.start()
            listener = hidden
        # The store takes over the descriptor; its own client comes through the gate, as the ranks
        # do.
        self.store: dist.Store = dist.TCPStore(
            _LOOPBACK,
            self.port,
            size,
            is_master=True,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )

    def close(self) -> None:
        """Close the gate: nobody reaches the store any more. A second call does nothing."""
        if self._gate is not None:
            self._gate.close()


class OpenStore:
    """The store of ranks on several hosts. The socket is bound here because torch's listens
    everywhere.
    """

    def __init__(self, address: str, port: int = 0) -> None:
        import torch.distributed as dist

        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.create_server((address, port), family=family)
        self.port: int = listener.getsockname()[1]
        self.store: dist.Store = dist.TCPStore(
            address,
            self.port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )


def _listen(address: str, port: int, *, nobody: bool = False) -> socket.socket:
    """`nobody`: connections are dropped from the first moment on."""
    listener = socket.socket()
    if nobody:
        _pass_only(listener, ())
    listener.bind((address, port))
    listener.listen(128)
    return listener


def _pass_only(listener: socket.socket, ports: Iterable[int]) -> None:
    """Have the kernel drop every packet to `listener` that does not come from one of these
    ports.
    """
    program = [_LOAD_SOURCE_PORT]
    for port in ports:
        program += [(*_IF_NOT_SKIP_ONE, port), _PASS]
    code = b"".join(struct.pack("=HBBI", *instruction) for instruction in [*program, _DROP])
    memory = ctypes.create_string_buffer(code, len(code))
    listener.setsockopt(
        socket.SOL_SOCKET,
        _ATTACH_FILTER,
        struct.pack("@HP", len(code) // 8, ctypes.addressof(memory)),
    )


class _Gate(threading.Thread):
    """Passes on what processes of this user say to the store, and what it answers."""

    def __init__(self, listener: socket.socket, hidden: socket.socket) -> None:
        super().__init__(name="lockstep-store-gate", daemon=True)
        self._listener, self._hidden = listener, hidden.dup()
        self._over, self._wake = socket.socketpair()
        # ports of connections from which the store has not answered yet: they pass the filter
        self._opening: set[int] = set()
        self._refused: set[int] = set()

    def close(self) -> None:
        self._wake.close()
        self.join()

    def run(self) -> None:
        with self._listener, self._hidden, self._over:
            asyncio.run(self._serve())

    async def _serve(self) -> None:
        for each in (self._listener, self._over):
            each.setblocking(False)
        loop = asyncio.get_running_loop()
        accepting = loop.create_task(self._accept(loop))
        await loop.sock_recv(self._over, 1)  # returns as the gate is closed
        accepting.cancel()

    async def _accept(self, loop: asyncio.AbstractEventLoop) -> None:
        connections = set()
        while True:
            caller, address = await loop.sock_accept(self._listener)
            if self._admits(address, caller.getsockname()):
                connections.add(connection := loop.create_task(self._connect(loop, caller)))
                connection.add_done_callback(connections.discard)
            else:
                caller.close()

    def _admits(self, caller: Address, here: Address) -> bool:
        users = owners([(caller, here)])[0]
        for user in users - {os.geteuid()} - self._refused:
            self._refused.add(user)
            print(
                f"lockstep: user {user} of this host tried to connect to the ranks' store and was"
                " refused",
                file=sys.stderr,
                flush=True,
            )
        return users == {os.geteuid()}

    async def _connect(self, loop: asyncio.AbstractEventLoop, rank: socket.socket) -> None:
        with rank, socket.socket() as store:
            store.bind((_LOOPBACK, 0))  # the port is this process's before the filter lets it pass
            self._opening.add(store.getsockname()[1])
            _pass_only(self._hidden, self._opening)
            store.connect(self._hidden.getsockname())
            for end in (rank, store):
                end.setblocking(False)
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            pumps = [
                loop.create_task(self._pass_on(loop, *ends))
                for ends in ((rank, store), (store, rank))
            ]
            try:
                await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            finally:
                self._opened(store)
                for pump in pumps:
                    pump.cancel()
                await asyncio.wait(pumps)

    async def _pass_on(
        self, loop: asyncio.AbstractEventLoop, source: socket.socket, target: socket.socket
    ) -> None:
        """Until one of them hangs up."""
        with suppress(OSError):
            while data := await loop.sock_recv(source, _PIECE):
                self._opened(source)
                await loop.sock_sendall(target, data)

    def _opened(self, store: socket.socket) -> None:
        """It has answered, or goes: the filter need not let this port pass any more."""
        port = store.getsockname()[1]
        if port in self._opening:
            self._opening.remove(port)
            _pass_only(self._hidden, self._opening)


_TRIES = 3  # the table may change while it is read
_GONE = "0"  # inode of a socket that its process has closed; its user is no longer known

Address = tuple[str, int]
Connection = tuple[Address, Address]
"""There and here."""


def owners(connections: Sequence[Connection]) -> list[set[int]]:
    """Of each connection, the user of its other end on this host; nobody where it is gone.

    Only ports are compared. Where other addresses have connected the same two ports, their users
    are among them.
    """
    wanted = [(f"{there[1]:04X}", f"{here[1]:04X}") for there, here in connections]
    for _ in range(_TRIES):
        found: dict[tuple[str, str], set[int]] = {ports: set() for ports in wanted}
        for table in ("/proc/net/tcp", "/proc/net/tcp6"):
            with suppress(OSError):
                for line in Path(table).read_text().splitlines()[1:]:
                    _, there, here, _, _, _, _, user, _, inode, *_ = line.split()
                    ports = there.rpartition(":")[2], here.rpartition(":")[2]
                    if inode != _GONE and ports in found:
                        found[ports].add(int(user))
        if all(found.values()):
            break
    return [found[ports] for ports in wanted]


@contextmanager
def no_strangers(what: str) -> Iterator[None]:
    """At the block's end, check who from this host has connected to the ports that were opened in
    it (`what` opened them).

    Raises:
        LockstepError: another user has.
        PeerFailed: somebody has, and is gone again.
    """
    if sys.platform != "linux":
        yield
        return
    process = psutil.Process()
    before = _listening(process.net_connections("tcp"))
    yield
    sockets = process.net_connections("tcp")
    ports = _listening(sockets) - before
    callers = [
        (each.raddr, each.laddr)
        for each in sockets
        if each.raddr and each.laddr.port in ports and _on_this_host(each)
    ]
    for users in owners(callers) if callers else ():
        if not users:
            raise PeerFailed("caller-gone", what=what)
        for user in users - {os.geteuid()}:
            raise LockstepError("caller-of-another-user", user=user, own=os.geteuid(), what=what)


def _listening(sockets: Sequence[Any]) -> set[int]:
    return {each.laddr.port for each in sockets if each.status == psutil.CONN_LISTEN}


def _on_this_host(connection: Any) -> bool:
    there, here = (each.ip.removeprefix("::ffff:") for each in (connection.raddr, connection.laddr))
    return there == here or ip_address(there).is_loopback
