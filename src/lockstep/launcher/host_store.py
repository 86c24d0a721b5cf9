"""The store through which the ranks of one host find each other: other users of the host can neither read nor write it.

torch's TCPStore asks nobody who they are, and every local user can connect to a loopback port. So the store itself listens behind a packet
filter that drops everybody, and a gate listens where the ranks connect to. The gate asks the kernel which user owns the other end of a
connection, and passes on what this user's processes say; torch's own clients notice nothing.

    rank --- 127.0.0.1:PORT, the gate --- 127.0.0.2:PORT, behind the filter: TCPStore

The filter lets only those connections in that the gate is opening. Linux only: elsewhere the store listens on loopback without a gate.
"""

from __future__ import annotations

import ctypes
import os
import selectors
import socket
import struct
import sys
import threading
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING

from lockstep.launcher.local_peers import Address, owner_of

if TYPE_CHECKING:
    import torch.distributed as dist

_LOOPBACK, _BEHIND = "127.0.0.1", "127.0.0.2"
_ATTACH_FILTER = 26  # SO_ATTACH_FILTER, which Python does not name
_LOAD_SOURCE_PORT = (0x28, 0, 0, 0)  # classic BPF (linux/filter.h); a TCP listener's packets begin at the TCP header
_IF_NOT_SKIP_ONE = 0x15, 0, 1
_PASS, _DROP = (0x06, 0, 0, 0xFFFFFFFF), (0x06, 0, 0, 0)
_PIECE = 2**16  # bytes that are read at once


class HostStore:
    """A key-value store in this process for the ranks of this host, until closed. `port` is on 127.0.0.1."""

    def __init__(self, size: int | None = None, timeout: timedelta = timedelta(minutes=5)) -> None:
        import torch.distributed as dist

        listener, self.port = _listen(_LOOPBACK, 0), 0
        self.port = listener.getsockname()[1]
        self._gate: _Gate | None = None
        if sys.platform == "linux":
            self._gate = _Gate(listener, hidden := _listen(_BEHIND, self.port, nobody=True))
            self._gate.start()
            listener = hidden
        # The store takes over the descriptor; its own client comes through the gate, as the ranks do.
        self.store: dist.Store = dist.TCPStore(
            _LOOPBACK, self.port, size, is_master=True, timeout=timeout, wait_for_workers=False, master_listen_fd=listener.detach()
        )

    def close(self) -> None:
        """Close the gate: nobody reaches the store any more. A second call does nothing."""
        if self._gate is not None:
            self._gate.close()


def _listen(address: str, port: int, *, nobody: bool = False) -> socket.socket:
    """`nobody`: connections are dropped from the first moment on."""
    listener = socket.socket()
    if nobody:
        _pass_only(listener, ())
    listener.bind((address, port))
    listener.listen(128)
    return listener


def _pass_only(listener: socket.socket, ports: Iterable[int]) -> None:
    """Have the kernel drop every packet to `listener` that does not come from one of these ports."""
    program = [_LOAD_SOURCE_PORT]
    for port in ports:
        program += [(*_IF_NOT_SKIP_ONE, port), _PASS]
    code = b"".join(struct.pack("=HBBI", *instruction) for instruction in [*program, _DROP])
    memory = ctypes.create_string_buffer(code, len(code))
    listener.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, struct.pack("@HP", len(code) // 8, ctypes.addressof(memory)))


@dataclass(slots=True, eq=False)
class _End:
    """One of a connection's two sockets: a rank's, or the store's."""

    socket: socket.socket
    other: _End | None = None
    leaving: bytearray = field(default_factory=bytearray)
    """What could not be sent yet. Nothing more is read from the other end meanwhile."""
    ended: bool = False


class _Gate(threading.Thread):
    """Passes on what processes of this user say to the store, and what it answers."""

    def __init__(self, listener: socket.socket, hidden: socket.socket) -> None:
        super().__init__(name="lockstep-store-gate", daemon=True)
        self._listener, self._hidden = listener, hidden.dup()
        self._behind: Address = hidden.getsockname()
        self._opening: dict[_End, int] = {}  # the store's ends from which nothing has come yet: their ports pass the filter
        self._over, self._wake = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        for each in (listener, self._over):
            each.setblocking(False)
            self._selector.register(each, selectors.EVENT_READ)
        self._refused: set[int] = set()

    def close(self) -> None:
        with suppress(OSError):
            self._wake.send(b".")
        self.join()

    def run(self) -> None:
        while True:
            for key, events in self._selector.select():
                if key.fileobj is self._over:
                    self._end()
                    return
                if key.fileobj is self._listener:
                    self._answer()
                elif not key.data.ended:
                    self._serve(key.data, events)

    def _end(self) -> None:
        for key in list(self._selector.get_map().values()):
            assert isinstance(key.fileobj, socket.socket)
            key.fileobj.close()
        for each in (self._hidden, self._wake):
            each.close()
        self._selector.close()

    def _answer(self) -> None:
        try:
            caller, address = self._listener.accept()
        except OSError:
            return  # it has gone already
        user = owner_of(address, caller.getsockname())
        if user == os.geteuid():
            self._connect(caller)
            return
        caller.close()
        if user is not None and user not in self._refused:
            self._refused.add(user)
            print(f"lockstep: user {user} of this host tried to connect to the ranks' store and was refused", file=sys.stderr, flush=True)

    def _connect(self, caller: socket.socket) -> None:
        inner = socket.socket()
        inner.bind((_LOOPBACK, 0))  # the port is this process's before the filter lets it pass
        rank, store = _End(caller), _End(inner)
        rank.other, store.other = store, rank
        self._opening[store] = inner.getsockname()[1]
        _pass_only(self._hidden, self._opening.values())
        inner.connect(self._behind)
        for end in (rank, store):
            end.socket.setblocking(False)
            end.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._selector.register(end.socket, selectors.EVENT_READ, end)

    def _serve(self, end: _End, events: int) -> None:
        other = end.other
        assert other is not None
        try:
            if events & selectors.EVENT_WRITE:
                del end.leaving[: end.socket.send(end.leaving)]
            if events & selectors.EVENT_READ and not other.leaving:
                data = end.socket.recv(_PIECE)
                if not data:
                    self._hang_up(end)
                    return
                if end in self._opening:
                    self._opened(end)
                self._send(other, data)
        except BlockingIOError:
            return
        except OSError:
            self._hang_up(end)
            return
        for each in (end, other):
            self._watch(each)

    def _send(self, end: _End, data: bytes) -> None:
        sent = 0
        with suppress(BlockingIOError):
            sent = end.socket.send(data)
        end.leaving += data[sent:]

    def _watch(self, end: _End) -> None:
        assert end.other is not None
        wanted = (0 if end.other.leaving else selectors.EVENT_READ) | (selectors.EVENT_WRITE if end.leaving else 0)
        known = self._selector.get_map().get(end.socket)
        if known is not None and not wanted:
            self._selector.unregister(end.socket)
        elif known is None and wanted:
            self._selector.register(end.socket, wanted, end)
        elif known is not None and known.events != wanted:
            self._selector.modify(end.socket, wanted, end)

    def _hang_up(self, end: _End) -> None:
        """Nothing was waiting to be sent to the other end, or it is gone as well."""
        assert end.other is not None
        for each in (end, end.other):
            each.ended = True
            if each in self._opening:
                self._opened(each)
            with suppress(KeyError):
                self._selector.unregister(each.socket)
            each.socket.close()

    def _opened(self, store: _End) -> None:
        """The store has answered, or has gone: the filter need not let this port pass any more."""
        del self._opening[store]
        _pass_only(self._hidden, self._opening.values())
