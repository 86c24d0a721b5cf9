"""The store through which the ranks of one host find each other. Other users of the host can
neither read nor write it.

torch's TCPStore has no authentication, and every local user can connect to a loopback port. So the
store listens behind a packet filter, and ranks connect to a gate. The gate asks the kernel which
user owns the other end of a connection. It forwards only the data of this user's processes; torch's
clients need no change.

    rank --- 127.0.0.1:PORT, the gate --- 127.0.0.2:PORT, behind the filter: TCPStore

The filter drops all packets except those of connections that the gate is opening. Linux only:
elsewhere the store listens on loopback without a gate.
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
_PIECE = 2**16  # bytes per read


class HostStore:
    """A key-value store in this process for the ranks of this host, until it is closed. It listens
    on `port` of 127.0.0.1.
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
        # The store takes over the descriptor. Its own client connects through the gate, as the
        # ranks do.
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
        """Close the gate, so that no process reaches the store. A second call does nothing."""
        if self._gate is not None:
            self._gate.close()


class OpenStore:
    """The store of ranks on several hosts. The socket is bound here because torch's own would
    listen on every interface.
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
    """Return a listening socket. With `nobody`, the kernel drops all connections from the start."""
    listener = socket.socket()
    if nobody:
        _pass_only(listener, ())
    listener.bind((address, port))
    listener.listen(128)
    return listener


def _pass_only(listener: socket.socket, ports: Iterable[int]) -> None:
    """Have the kernel drop every packet to `listener` that does not come from one of `ports`."""
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
    """A thread that forwards data between this user's processes and the store."""

    def __init__(self, listener: socket.socket, hidden: socket.socket) -> None:
        super().__init__(name="lockstep-store-gate", daemon=True)
        self._listener, self._hidden = listener, hidden.dup()
        self._over, self._wake = socket.socketpair()
        # ports of connections on which the store has not answered yet: they pass the filter
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
        await loop.sock_recv(self._over, 1)  # returns when the gate is closed
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
            # bind first, so that the port is ours before the filter passes it
            store.bind((_LOOPBACK, 0))
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
        """Forward data until one end closes the connection."""
        with suppress(OSError):
            while data := await loop.sock_recv(source, _PIECE):
                self._opened(source)
                await loop.sock_sendall(target, data)

    def _opened(self, store: socket.socket) -> None:
        """Remove the port of `store` from the filter: the store has answered, or the connection
        ends.
        """
        port = store.getsockname()[1]
        if port in self._opening:
            self._opening.remove(port)
            _pass_only(self._hidden, self._opening)


_TRIES = 3  # the table may change while it is read
_GONE = "0"  # inode of a socket that its process has closed: its user is no longer known

Address = tuple[str, int]
Connection = tuple[Address, Address]
"""The addresses of a connection's two ends: the remote end, then this process's end."""


def owners(connections: Sequence[Connection]) -> list[set[int]]:
    """Return, for each connection, the users of its other end on this host; an empty set if it is
    closed.

    Only ports are compared. If other addresses have a connection between the same two ports, the
    set has their users too.
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
    """At the block's end, check which users of this host have connected to the ports that `what`
    opened in the block.

    Raises:
        LockstepError: another user has connected.
        PeerFailed: a process has connected and closed its end, so that its user is unknown.
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
