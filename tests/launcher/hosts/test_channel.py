"""The channel: what passes, and every way of tampering with it."""

from __future__ import annotations

import json
import pickle

import pytest

from lockstep.launcher.hosts.channel import Greeting, Signed, Stranger
from lockstep.launcher.hosts.token import Token

TOKEN = Token(b"k" * 32)


def pair(token: Token = TOKEN) -> tuple[Signed, Signed]:
    guest, meeting = Greeting(token), Greeting(token)
    return guest.answered(meeting.line, "guest"), meeting.answered(guest.line, "meeting")


def test_messages_pass_both_ways_in_order() -> None:
    guest, meeting = pair()
    for number in range(3):
        assert meeting.opened(guest.packed({"kind": "a", "number": number})) == {"kind": "a", "number": number}
        assert guest.opened(meeting.packed({"kind": "b", "text": "ü\n"})) == {"kind": "b", "text": "ü\n"}


def test_a_line_changed_repeated_left_out_sent_back_or_of_another_connection_is_a_strangers() -> None:
    line = pair()[0].packed({"kind": "join", "workers": 2})
    for changed in (line.replace(b"2}", b"3}"), b"0" + line[1:], line.partition(b" ")[2], b"", b"\xff\n"):
        guest, meeting = pair()
        with pytest.raises(Stranger):
            meeting.opened(changed)
    guest, meeting = pair()
    first, second = guest.packed({"kind": "a"}), guest.packed({"kind": "a"})
    meeting.opened(first)
    with pytest.raises(Stranger, match="does not know the job token"):
        meeting.opened(first)
    guest, meeting = pair()
    guest.packed({"kind": "a"})
    with pytest.raises(Stranger):
        meeting.opened(second)
    guest, meeting = pair()
    with pytest.raises(Stranger):
        guest.opened(guest.packed({"kind": "a"}))
    with pytest.raises(Stranger):
        meeting.opened(line)


def test_a_pickle_is_never_looked_into() -> None:
    class Trap:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return pytest.fail, ("unpickled",)

    _, meeting = pair()
    for line in (pickle.dumps(Trap()), b"0" * 64 + b" " + pickle.dumps(Trap())):
        with pytest.raises(Stranger):
            meeting.opened(line)
        with pytest.raises(Stranger):
            Greeting(TOKEN).answered(line, "guest")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"HTTP/1.0 400 Bad Request\r\n", "something else than `lockstep` .*HTTP/1.0 400"),
        (b"", "something else than `lockstep`"),
        (b"[1]\n", "something else"),
        (json.dumps({"lockstep": 2, "job": TOKEN.job, "nonce": "0"}).encode(), "another version of Lockstep"),
        (Greeting(Token(b"x" * 32)).line, "another job .its token is another one"),
    ],
)
def test_who_else_may_serve_the_port_is_told(line: bytes, message: str) -> None:
    with pytest.raises(Stranger, match=message):
        Greeting(TOKEN).answered(line, "guest")
