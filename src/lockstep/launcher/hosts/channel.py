"""What two agents say to each other: lines of JSON, each signed with the job token.

    both, at once         {"lockstep": 1, "job": "...", "nonce": "..."}          in the open: who serves this port, for which job
    both, from then on    <HMAC-SHA256 in hex> {"kind": "...", ...}

The key is made of the token and both nonces, and what is signed names the side and counts the lines: a line cannot be forged, replayed on
another connection, repeated, left out or sent back. A line is looked at only after its signature; nothing is unpickled.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
from collections.abc import Mapping
from typing import Any, Literal

from lockstep.launcher.hosts.token import Token

VERSION = 1
LONGEST_GREETING = 256
LONGEST = 2**18
"""Bytes of a line. A traceback that would not fit is cut by who sends it."""

Side = Literal["guest", "meeting"]
Message = dict[str, Any]


class Stranger(Exception):
    """The other side is not of this job: the text says what it is instead."""


class Greeting:
    """What one side draws and says first."""

    def __init__(self, token: Token) -> None:
        self._token = token
        self._nonce = secrets.token_hex(16)

    @property
    def line(self) -> bytes:
        return json.dumps({"lockstep": VERSION, "job": self._token.job, "nonce": self._nonce}).encode() + b"\n"

    def answered(self, line: bytes, side: Side) -> Signed:
        """The channel, now that the other's greeting is here. Raises Stranger."""
        said = _greeting(line)
        if said["lockstep"] != VERSION:
            raise Stranger(f"another version of Lockstep, whose agents speak another way ({said['lockstep']!r}, here {VERSION})")
        if said.get("job") != self._token.job:
            raise Stranger(f"another job (its token is another one: job {str(said.get('job'))[:16]!r}, here {self._token.job!r})")
        theirs = str(said.get("nonce"))
        mine, other = (self._nonce, theirs) if side == "guest" else (theirs, self._nonce)
        return Signed(self._token.session(mine, other), side)


class Signed:
    """One connection's lines, counted and signed in both directions."""

    def __init__(self, key: bytes, side: Side) -> None:
        self._key = key
        self._side: Side = side
        self._other: Side = "meeting" if side == "guest" else "guest"
        self._sent = self._received = 0

    def packed(self, message: Mapping[str, Any]) -> bytes:
        body = json.dumps(message).encode()
        assert len(body) < LONGEST - 100
        self._sent += 1
        return f"{self._mac(self._side, self._sent, body)} ".encode() + body + b"\n"

    def opened(self, line: bytes) -> Message:
        """Raises Stranger where the line was not signed for this place by the other side."""
        mac, _, body = line.rstrip(b"\n").partition(b" ")
        self._received += 1
        if not hmac.compare_digest(mac, self._mac(self._other, self._received, body).encode()):
            raise Stranger("somebody who does not know the job token")
        message = json.loads(body)
        if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
            raise Stranger("an agent that does not follow the protocol")
        return message

    def _mac(self, side: Side, number: int, body: bytes) -> str:
        return hmac.new(self._key, f"{side} {number} ".encode() + body, hashlib.sha256).hexdigest()


def _greeting(line: bytes) -> Message:
    try:
        said = json.loads(line)
        if isinstance(said, dict) and "lockstep" in said:
            return said
    except ValueError:
        pass
    shown = line[:40].decode("ascii", errors="replace").strip()
    raise Stranger(f"something else than `lockstep` (it said {shown!r})")
