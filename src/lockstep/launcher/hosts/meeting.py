"""The meeting: a thread of the first host's agent that the agents of all hosts, its own too, are connected to.

It listens on the one address that --meet names. A connection is worth nothing until it has proved that it knows the job token: until then
it may send one short line, for a few seconds. What the meeting decides stands in membership.py; here is only how it is heard.
"""

from __future__ import annotations

import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from lockstep.launcher.hosts import channel
from lockstep.launcher.hosts.channel import Greeting, Message, Signed, Stranger
from lockstep.launcher.hosts.digests import Digest
from lockstep.launcher.hosts.interfaces import family_of
from lockstep.launcher.hosts.membership import Membership
from lockstep.launcher.hosts.messages import End, Newcomer, Report
from lockstep.launcher.hosts.token import Token

HEARTBEAT_SECONDS = 1.0
SILENCE_SECONDS = 8.0
"""After which the other side of a connection is taken for gone."""
LOADING_SECONDS = 60.0
"""The same while its process loads torch, in which its threads stand still for moments that a busy host makes long."""
GREETING_SECONDS = 8.0
_LOOK_SECONDS = 0.05
_FLUSH_SECONDS = 3.0  # for the last word to reach everybody
_MOST_UNPROVED = 64


def listen(address: str, port: int) -> socket.socket | None:
    """A listener on that address alone; None where it is not this host's, or the port is taken. Raises OSError for anything else."""
    listener = socket.socket(family_of(address), socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(128)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        if isinstance(error, PermissionError):
            raise
        return None
    return listener


class _Guest:
    """One connection, as the meeting sees it."""

    def __init__(self, sock: socket.socket, peer: str, token: Token, now: float) -> None:
        self.sock, self.peer = sock, peer
        self.greeting = Greeting(token)
        self.signed: Signed | None = None
        self.proved = self.joined = self.told = False
        self.came = self.heard = self.spoke = now
        self.out = bytearray(self.greeting.line)
        self._in = bytearray()

    def read(self) -> list[Message]:
        """What has come. Raises Stranger, and OSError or EOFError where the connection has ended."""
        chunk = self.sock.recv(65536)
        if not chunk:
            raise EOFError
        self._in += chunk
        messages = []
        while (end := self._in.find(b"\n")) >= 0:
            line = bytes(self._in[: end + 1])
            del self._in[: end + 1]
            if self.signed is None:
                self.signed = self.greeting.answered(line, "meeting")
            else:
                messages.append(self.signed.opened(line))
                self.proved = True
        if len(self._in) > (channel.LONGEST if self.proved else channel.LONGEST_GREETING + 1024):
            raise Stranger("somebody who sends lines without end")
        return messages

    def say(self, message: Message) -> None:
        if self.signed is not None:
            self.out += self.signed.packed(message)

    def flush(self) -> None:
        if self.out:
            with suppress(BlockingIOError):
                del self.out[: self.sock.send(self.out)]


class Meeting:
    """Held from its making until `close()`. `say(line)` prints what is to be known on this host."""

    def __init__(self, listener: socket.socket, token: Token, membership: Membership, say: Callable[[str], None]) -> None:
        self._listener, self._token, self._membership, self._say = listener, token, membership, say
        self._guests: dict[int, _Guest] = {}
        self._number = 0
        self._refused: set[str] = set()
        self._closing: float | None = None
        self._lock = threading.Lock()
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ, None)
        self._thread = threading.Thread(target=self._run, name="lockstep-meeting", daemon=True)
        self._thread.start()

    def call_off(self, line: str, code: int) -> None:
        """End the run on all hosts, also on those that come within a moment."""
        with self._lock:
            self._membership.call_off(End(code=code, line=line))

    def close(self) -> None:
        """Return when everybody has heard the last word and left, or could not."""
        with self._lock:
            self._closing = time.monotonic() + _FLUSH_SECONDS
        self._thread.join()

    # -- the thread --------------------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._over():
                ready = self._selector.select(_LOOK_SECONDS)
                with self._lock:
                    now = time.monotonic()
                    for key, _ in ready:
                        if key.data is None:
                            self._accept(now)
                        else:
                            self._hear(key.data, now)
                    self._look_after(now)
        except BaseException as error:  # the guests see the connections end; this host says why
            self._say(f"the meeting of the hosts has failed: {type(error).__name__}: {error}")
            raise
        finally:
            for number in list(self._guests):
                self._drop(number)
            self._selector.close()
            self._listener.close()

    def _over(self) -> bool:
        if self._closing is None:
            return False
        return not self._guests or time.monotonic() > self._closing

    def _accept(self, now: float) -> None:
        with suppress(OSError):
            sock, address = self._listener.accept()
            sock.setblocking(False)
            if sum(not guest.proved for guest in self._guests.values()) >= _MOST_UNPROVED:
                sock.close()
                return
            self._number += 1
            self._guests[self._number] = _Guest(sock, str(address[0]), self._token, now)
            self._selector.register(sock, selectors.EVENT_READ, self._number)

    def _hear(self, number: int, now: float) -> None:
        guest = self._guests.get(number)
        if guest is None:
            return
        try:
            for message in guest.read():
                guest.heard = now
                self._understand(number, guest, message, now)
        except BlockingIOError:
            return
        except Stranger as stranger:
            if guest.peer not in self._refused:
                self._refused.add(guest.peer)
                self._say(f"refused {guest.peer}, which came to the meeting: it is {stranger}")
            with suppress(OSError):
                guest.flush()
            self._lose(number, "broke the protocol", now)
        except (OSError, EOFError):
            self._lose(number, "has gone: its agent ended without a word", now)

    def _understand(self, number: int, guest: _Guest, message: Message, now: float) -> None:
        if message["kind"] == "clock":
            guest.say({"kind": "clock", "now": time.monotonic_ns()})
        elif message["kind"] == "join":
            guest.joined = True
            self._membership.join(number, Newcomer.of(message), now)
        elif message["kind"] == "report":
            self._membership.report(number, Report.of(message), now)
        elif message["kind"] == "quiet":
            self._membership.quiet(number, message["generation"], Digest.of(message))
        elif message["kind"] == "moving":
            self._membership.moving(number, message["generation"])

    def _look_after(self, now: float) -> None:
        self._membership.tick(now)
        for number, guest in list(self._guests.items()):
            if not guest.proved and now - guest.came > GREETING_SECONDS:
                self._drop(number)
            elif guest.proved and now - guest.heard > (patience := SILENCE_SECONDS if guest.joined else LOADING_SECONDS):
                self._lose(number, f"has gone: nothing was heard of its agent for {patience:g} s", now)
        self._send(now)

    def _send(self, now: float) -> None:
        outbox, self._membership.outbox = self._membership.outbox, []
        for number, message in outbox:
            if number in self._guests:
                self._guests[number].say(message)
                self._guests[number].spoke = now
        end = self._membership.end
        for number, guest in list(self._guests.items()):
            if guest.proved and end is not None and not guest.told:
                guest.told = True
                guest.say(end.message())
            if guest.proved and now - guest.spoke > HEARTBEAT_SECONDS:
                guest.say({"kind": "alive"})
                guest.spoke = now
            try:
                guest.flush()
            except OSError:
                self._lose(number, "has gone: its agent ended without a word", now)

    def _lose(self, number: int, why: str, now: float) -> None:
        self._drop(number)
        self._membership.leave(number, why, now)

    def _drop(self, number: int) -> None:
        guest = self._guests.pop(number)
        self._selector.unregister(guest.sock)
        guest.sock.close()


def to_stderr(line: str) -> None:
    """One line."""
    print(line, file=sys.stderr, flush=True)
