"""A meeting and its guests over loopback, and whoever else may serve the port or come to it."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from torch.distributed import TCPStore

from lockstep.errors import UsageError
from lockstep.launcher.hosts import guest as guests
from lockstep.launcher.hosts import meeting as meetings
from lockstep.launcher.hosts.guest import Guest, Lost
from lockstep.launcher.hosts.meeting import Meeting, listen
from lockstep.launcher.hosts.membership import Membership
from lockstep.launcher.hosts.messages import End, Newcomer, Report, Roll
from lockstep.launcher.hosts.plan import Plan
from lockstep.launcher.hosts.token import Token
from tests.launcher.hosts.test_membership import failure

TOKEN = Token(b"k" * 32)
HERE = "127.0.0.1"


class Room:
    """A meeting of two, and what it says."""

    def __init__(self, token: Token = TOKEN, *, least: int = 2) -> None:
        listener = listen(HERE, 0)
        assert listener is not None
        self.port: int = listener.getsockname()[1]
        self.said: list[str] = []
        plan = Plan(least=least, most=2, meet=HERE)
        self.membership = Membership(plan, time.monotonic(), lambda size: (HERE, 7))
        self.meeting = Meeting(listener, token, self.membership, self.said.append)
        self.guests: list[Guest] = []

    def guest(self, token: Token = TOKEN) -> Guest:
        self.guests.append(Guest(HERE, self.port, token, 5))
        return self.guests[-1]

    def host(self, name: str, *, hosting: bool = False, **facts: str) -> Guest:
        guest = self.guest()
        guest.join(Newcomer(name=name, address=HERE, pid=1, workers=2, hosting=hosting, facts=facts))
        return guest


@pytest.fixture
def room() -> Iterator[Room]:
    made = Room()
    yield made
    for guest in made.guests:
        guest.close()
    made.meeting.close()


def within(guest: Guest, seconds: float = 20) -> Roll | End | None:
    until = time.monotonic() + seconds
    return guest.wait(lambda: time.monotonic() > until)


def test_two_meet_and_hear_the_same_end(room: Room) -> None:
    anna, bert = room.host("anna", hosting=True), room.host("bert")
    rolls = [within(anna), within(bert)]
    assert {roll.index for roll in rolls if isinstance(roll, Roll)} == {0, 1}
    assert not anna.called_off()
    mine = replace(failure(2, time.monotonic_ns()), traceback="x" * 100_000)
    bert.report(Report(failure=mine))
    until = time.monotonic() + 20
    while not anna.called_off():
        assert time.monotonic() < until
    anna.report(Report())
    ends = [within(anna), within(bert)]
    assert ends[0] == ends[1]
    assert isinstance(ends[0], End)
    assert ends[0].failure is not None
    assert ends[0].failure.host == "h (127.0.0.1)"
    assert len(ends[0].failure.traceback) < 50_000
    difference = abs(ends[0].failure.monotonic_ns - mine.monotonic_ns)
    assert difference < 1_000_000_000, "one clock here, so its time is the same but for the way there"


def test_times_are_put_on_the_meetings_clock(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    day = 86_400 * 10**9
    clock = time.monotonic_ns

    class Clock:
        """Of the guest's process: a day ahead of the meeting's."""

        monotonic, sleep = staticmethod(time.monotonic), staticmethod(time.sleep)

        @staticmethod
        def monotonic_ns() -> int:
            return clock() + day

    monkeypatch.setattr(guests, "time", Clock)
    guest = room.guest()
    until = time.monotonic() + 20
    while guest._clock_ns == 0:
        assert time.monotonic() < until
    assert abs(guest._clock_ns + day) < 10**9


def test_the_end_of_a_guest_and_of_the_meeting_are_noticed(room: Room) -> None:
    anna, bert = room.host("anna", hosting=True), room.host("bert")
    assert isinstance(within(anna), Roll)
    assert isinstance(within(bert), Roll)
    bert._sock.shutdown(socket.SHUT_RDWR)
    until = time.monotonic() + 20
    while not anna.called_off():
        assert time.monotonic() < until
    with pytest.raises(Lost, match=rf"the meeting of the hosts at {HERE}:{room.port} has closed the connection: its agent has ended"):
        within(bert)
    anna.report(Report())
    end = within(anna)
    assert isinstance(end, End)
    assert end.failure is not None
    assert end.failure.message.startswith("has gone: its agent ended without a word; with it went ranks")


def test_silence_is_noticed_on_both_sides(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meetings, "SILENCE_SECONDS", 0.5)
    monkeypatch.setattr(guests, "HEARTBEAT_SECONDS", 3600)
    with pytest.raises(Lost, match="has closed the connection"):
        within(room.host("mute", hosting=True))
    monkeypatch.setattr(meetings, "SILENCE_SECONDS", 3600)
    monkeypatch.setattr(meetings, "HEARTBEAT_SECONDS", 3600)
    monkeypatch.setattr(guests, "LOADING_SECONDS", 0.5)
    with pytest.raises(Lost, match=r"has not been heard for 0.5 s: is the network gone\?"):
        within(room.guest())


def test_hosts_that_do_not_agree_hear_why(room: Room) -> None:
    room.host("anna", hosting=True, epochs="2")
    bert = room.host("bert", epochs="3")
    end = within(bert)
    assert isinstance(end, End)
    assert end.line == f"error: epochs is 2 on anna ({HERE}) and 3 on bert ({HERE}): give the same command on every host"
    assert end == within(room.guests[0])
    late = within(room.guest())
    assert late == end, "who comes after the last word hears it too"


def test_another_token_is_another_job_on_both_sides(room: Room) -> None:
    with pytest.raises(
        UsageError, match=rf"port {room.port} on {HERE} is served by another job \(its token is another one.*: give every host"
    ):
        room.guest(Token(b"x" * 32))
    until = time.monotonic() + 20
    while not room.said:
        assert time.monotonic() < until
    assert room.said == [
        f"refused {HERE}, which came to the meeting: it is another job (its token is another one: job {Token(b'x' * 32).job!r}, here {TOKEN.job!r})"
    ]


def test_who_does_not_know_the_token_gets_nothing_done(room: Room) -> None:
    """Also not with the right name of the job, which anybody can read."""
    room.host("anna", hosting=True)
    for line in (b'0000 {"kind": "join"}\n', b"x" * 3000):
        with socket.create_connection((HERE, room.port), timeout=20) as sock:
            sock.recv(1000)
            sock.sendall(json.dumps({"lockstep": 1, "job": TOKEN.job, "nonce": "0"}).encode() + b"\n" + line)
            assert sock.recv(1000) == b""
    assert room.membership.end is None
    assert len(room.membership._hosts) == 1


@contextmanager
def serving(answer: Callable[[socket.socket], None]) -> Iterator[int]:
    """A port on which every connection is answered like this."""
    over = threading.Event()
    kept: list[socket.socket] = []
    with socket.create_server((HERE, 0)) as listener:

        def serve() -> None:
            while not over.is_set():
                sock, _ = listener.accept()
                kept.append(sock)
                answer(sock)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        port: int = listener.getsockname()[1]
        try:
            yield port
        finally:
            over.set()
            with socket.create_connection((HERE, port)):
                thread.join()
            for sock in kept:
                sock.close()


def served_by(port: int) -> str:
    with pytest.raises(UsageError) as raised:
        Guest(HERE, port, TOKEN, 5)
    beginning = f"port {port} on {HERE} is served by "
    assert str(raised.value).startswith(beginning)
    assert str(raised.value).endswith(
        ": give every host the same --token and --meet, and a port of its own to every job (--meet HOST:PORT)"
    )
    return str(raised.value).removeprefix(beginning)


def test_a_strangers_service_on_the_port_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch, serving(lambda sock: None) as port:
        patch.setattr(guests, "GREETING_SECONDS", 0.3)
        assert served_by(port).startswith("something that says nothing for 0.3 s, and so not by `lockstep`")
    with serving(socket.socket.close) as port:
        assert served_by(port).startswith("something else than `lockstep` (it closed the connection at once)")
    with serving(lambda sock: sock.sendall(b"220 mail ready\r\n")) as port:
        assert served_by(port).startswith("something else than `lockstep` (it said '220 mail ready')")
    with serving(lambda sock: sock.sendall(b"x" * 10_000)) as port:
        assert served_by(port).startswith("something else than `lockstep` (it said 'xxx")


def test_a_web_server_and_a_strangers_store(monkeypatch: pytest.MonkeyPatch) -> None:
    class Silent(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            return

    with HTTPServer((HERE, 0), Silent) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        try:
            assert served_by(server.server_port).startswith("something else than `lockstep` (it said ")
        finally:
            thread.join()
    monkeypatch.setattr(guests, "GREETING_SECONDS", 1.0)
    store = TCPStore(HERE, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=5))
    assert "`lockstep`" in served_by(store.port)


def test_nobody_listens() -> None:
    with socket.create_server((HERE, 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(
        UsageError, match=rf"cannot reach the meeting at {HERE}:{port} \(connection refused, \d tries in 0.6 s\): is the command running"
    ):
        Guest(HERE, port, TOKEN, 0.6)


def test_a_listener_is_had_for_ones_own_address_and_a_free_port_only() -> None:
    listener = listen(HERE, 0)
    assert listener is not None
    with listener:
        assert listen(HERE, listener.getsockname()[1]) is None
    assert listen("192.0.2.77", 29400) is None
