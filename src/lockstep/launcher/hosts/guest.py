"""A host's own end of the meeting: how it is reached, what it tells, what comes back.

A thread keeps the connection alive and takes messages in, so that the agent can import torch, start ranks and wait for them meanwhile.
"""

from __future__ import annotations

import queue
import select
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace

from lockstep.errors import UsageError
from lockstep.launcher.hosts import channel
from lockstep.launcher.hosts.channel import Greeting, Message, Signed, Stranger
from lockstep.launcher.hosts.digests import Heard
from lockstep.launcher.hosts.interfaces import family_of
from lockstep.launcher.hosts.meeting import GREETING_SECONDS, HEARTBEAT_SECONDS, LOADING_SECONDS, SILENCE_SECONDS, to_stderr
from lockstep.launcher.hosts.messages import End, Newcomer, Report, Roll
from lockstep.launcher.hosts.token import Token

_PAUSE_SECONDS = 0.25  # between two attempts to connect
_LOOK_SECONDS = 0.1


class Lost(Exception):
    """The connection to the meeting has ended: the text continues "HOST ..."."""


class Guest:
    """One connection to the meeting at `address`:`port`, made here. `own`: it is held in this process.

    Raises UsageError where nobody answers within `seconds`, or the port is served by something else.
    """

    def __init__(self, address: str, port: int, token: Token, seconds: float, *, own: bool = False) -> None:
        self.meeting = f"{address}:{port}"
        self.own = own
        self._sock = _connected(address, port, seconds)
        self.address = str(self._sock.getsockname()[0])
        self._lines = _Lines(self._sock)
        self._signed = self._greet(token)
        self._sending = threading.Lock()
        self._inbox: queue.Queue[Message | Lost] = queue.Queue()
        self._generation = self._stopped = 0  # the last that was told of, and the last that was called off
        self._ended = False
        self._closed = threading.Event()
        self._clock_ns = 0
        self._asked_at = time.monotonic_ns()
        self._heard: Heard | None = None  # in the generation that runs
        self._about: dict[str, str] | None = None  # of the roll that has come last
        self.on_grow: Callable[[Mapping[str, str]], None] = lambda about: None
        """Called in this object's thread, with what the roll says of the run."""
        self._send({"kind": "clock"})
        self._thread = threading.Thread(target=self._run, name="lockstep-guest", daemon=True)
        self._thread.start()

    def _greet(self, token: Token) -> Signed:
        greeting = Greeting(token)
        host, _, port = self.meeting.rpartition(":")
        try:
            self._sock.settimeout(GREETING_SECONDS)
            self._sock.sendall(greeting.line)
            return greeting.answered(self._lines.first(), "guest")
        except TimeoutError:
            what = f"something that says nothing for {GREETING_SECONDS:g} s, and so not by `lockstep`"
        except Stranger as stranger:
            what = str(stranger)
        except (OSError, EOFError):
            what = "something else than `lockstep` (it closed the connection at once)"
        self._sock.close()
        raise UsageError(
            f"port {port} on {host} is served by {what}: give every host the same --token and --meet, and a port of its own to every job (--meet HOST:PORT)"
        )

    # -- what the agent does -----------------------------------------------------------------------------------------------------------

    def join(self, who: Newcomer) -> None:
        self._send(who.message())

    def report(self, report: Report) -> None:
        """How the generation ended here. Its failure's time is put on the meeting's clock, and its host's address beside the name."""
        failure = report.failure
        if failure is not None:
            told = replace(failure, monotonic_ns=failure.monotonic_ns + self._clock_ns, host=f"{failure.host} ({self.address})")
            report = replace(report, failure=told)
        self._send(report.message())

    def called_off(self) -> bool:
        """Whether the generation's ranks shall end: elsewhere they have failed or gone, or the meeting has."""
        return self._ended or self._stopped >= self._generation

    def listen(self, generation: int) -> Heard:
        """To what is told of ranks that do not get on."""
        self._heard = Heard(generation, self._send)
        return self._heard

    def wait(self, stopping: Callable[[], bool]) -> Roll | End | None:
        """What comes next; None if `stopping()`. Raises Lost."""
        while not stopping():
            try:
                message = self._inbox.get(timeout=_LOOK_SECONDS)
            except queue.Empty:
                continue
            if isinstance(message, Lost):
                raise message
            if message["kind"] == "roll":
                roll = Roll.of(message)
                self._generation = roll.generation
                return roll
            if message["kind"] == "end":
                return End.of(message)
            to_stderr(str(message["line"]))
        return None

    def close(self) -> None:
        self._closed.set()
        self._thread.join()
        self._sock.close()

    # -- the thread --------------------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._serve()
        except Stranger as stranger:
            self._lose(f"is {stranger}")
        except (OSError, EOFError):
            self._lose("has closed the connection: its agent has ended")

    def _serve(self) -> None:
        heard = spoke = time.monotonic()
        self._sock.settimeout(SILENCE_SECONDS)
        while not self._closed.is_set():
            readable, _, _ = select.select([self._sock], [], [], _LOOK_SECONDS)
            now = time.monotonic()
            if readable:
                heard = now
                for line in self._lines.read():
                    self._understand(self._signed.opened(line))
            patience = SILENCE_SECONDS if self._about is not None else LOADING_SECONDS
            if now - heard > patience:
                self._lose(f"has not been heard for {patience:g} s: is the network gone?")
                return
            if now - spoke > HEARTBEAT_SECONDS:
                spoke = now
                self._send({"kind": "alive"})

    def _understand(self, message: Message) -> None:
        kind = message["kind"]
        if kind == "clock":  # the answer was given halfway between asking and now
            self._clock_ns = int(message["now"]) - (self._asked_at + time.monotonic_ns()) // 2
        elif kind == "stop":
            self._stopped = int(message["generation"])
        elif kind in ("look", "verdict"):
            if self._heard is not None and message["generation"] == self._generation:
                self._heard.note(message)
        elif kind == "grow":
            self.on_grow(self._about or {})
        elif kind in ("roll", "again", "end", "waiting"):
            self._ended = self._ended or kind == "end"
            if kind == "roll":
                self._about = dict(Roll.of(message).about)
            self._inbox.put(message)

    def _lose(self, why: str) -> None:
        self._inbox.put(Lost(f"the meeting of the hosts at {self.meeting} {why}"))
        self._ended = True

    def _send(self, message: Message) -> None:
        with self._sending, suppress(OSError):  # that the connection has ended is seen where it is read
            self._sock.sendall(self._signed.packed(message))


def _connected(address: str, port: int, seconds: float) -> socket.socket:
    """Hosts do not start at the same moment, so a refusal is not the last word until `seconds` have passed."""
    deadline, tries = time.monotonic() + seconds, 0
    while True:
        tries += 1
        sock = socket.socket(family_of(address), socket.SOCK_STREAM)
        try:
            sock.settimeout(max(0.1, deadline - time.monotonic()))
            sock.connect((address, port))
            return sock
        except OSError as error:
            sock.close()
            why = "no answer" if isinstance(error, TimeoutError) else (error.strerror or str(error)).lower()
            if time.monotonic() + _PAUSE_SECONDS > deadline:
                raise UsageError(
                    f"{socket.gethostname()} cannot reach the meeting at {address}:{port} ({why}, {tries} tries in {seconds:g} s): is the command running on "
                    "the first host, is --meet its address, and does no firewall block the port? Where hosts start at different times, give --join-timeout"
                ) from None
            time.sleep(_PAUSE_SECONDS)


class _Lines:
    """Whole lines from a socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._rest = b""

    def read(self) -> list[bytes]:
        """What one look brings, which may be no whole line. Raises EOFError where the connection has ended."""
        chunk = self._sock.recv(65536)
        if not chunk:
            raise EOFError
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        if len(self._rest) > channel.LONGEST:
            raise Stranger("somebody who sends lines without end")
        return lines

    def first(self) -> bytes:
        """The first line; what comes with it is kept for `read`."""
        while b"\n" not in self._rest:
            chunk = self._sock.recv(channel.LONGEST_GREETING)
            if not chunk and not self._rest:
                raise EOFError
            self._rest += chunk
            if not chunk or len(self._rest) > channel.LONGEST_GREETING:
                return self._rest
        line, _, self._rest = self._rest.partition(b"\n")
        return line
