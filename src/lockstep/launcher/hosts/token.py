"""The job token: the secret that makes the agents of one job recognise each other. It is never an argument and never printed."""

from __future__ import annotations

import hashlib
import hmac
import os
import stat
from collections.abc import MutableMapping
from pathlib import Path

from lockstep.errors import UsageError

DESCRIPTOR = "LOCKSTEP_TOKEN_FD"
"""Environment variable: the number of an inherited descriptor from which the token is read once."""

_LEAST_BYTES = 32
_MOST_CHARACTERS = 4096
_HOW_TO_MAKE_ONE = "make one with (umask 077; python -c 'import secrets; print(secrets.token_hex(32))' > token) and give every host a copy"


class Token:
    """At least 32 secret bytes."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    @property
    def job(self) -> str:
        """The job's name in the open. It tells nothing of the secret."""
        return self._mac(b"lockstep job")[:8].hex()

    def session(self, guest: str, meeting: str) -> bytes:
        """The key of one connection, from what each side drew for it: what was recorded on one connection is worth nothing on another."""
        return self._mac(b"lockstep session " + f"{guest} {meeting}".encode())

    def _mac(self, text: bytes) -> bytes:
        return hmac.digest(self._secret, text, hashlib.sha256)

    @classmethod
    def read(cls, file: Path | None, env: MutableMapping[str, str]) -> Token:
        """From `file`, else from the descriptor that `env` names (and which is taken out of it: ranks need not know).

        Raises UsageError where there is none, others can read the file, or it is too short.
        """
        if file is not None:
            return cls._of(_content(file), f"--token {file}")
        number = env.pop(DESCRIPTOR, None)
        if number is None:
            raise UsageError(f"--nodes over several hosts needs a secret that they share: give --token FILE; {_HOW_TO_MAKE_ONE}")
        try:
            with os.fdopen(int(number), encoding="ascii", errors="replace") as stream:
                return cls._of(stream.read(_MOST_CHARACTERS), f"{DESCRIPTOR}={number}")
        except (OSError, ValueError) as error:
            if isinstance(error, UsageError):
                raise
            raise UsageError(
                f"{DESCRIPTOR}={number} cannot be read ({error}): give the number of an open descriptor, or --token FILE"
            ) from None

    @classmethod
    def _of(cls, text: str, where: str) -> Token:
        try:
            secret = bytes.fromhex(text.strip())
        except ValueError:
            raise UsageError(f"{where} holds something else than hexadecimal digits: {_HOW_TO_MAKE_ONE}") from None
        if len(secret) < _LEAST_BYTES:
            raise UsageError(f"{where} holds {len(secret)} bytes and needs at least {_LEAST_BYTES}: {_HOW_TO_MAKE_ONE}")
        return cls(secret)


def _content(file: Path) -> str:
    """Looked at and read through one descriptor: what was checked is what is read."""
    try:
        with file.open(encoding="ascii", errors="replace") as stream:
            mode = stat.S_IMODE(os.fstat(stream.fileno()).st_mode)
            if mode & 0o077:
                raise UsageError(
                    f"--token {file} has mode {mode:04o} and can be read by others than its owner: chmod 600 {file}, or make a new one"
                )
            return stream.read(_MOST_CHARACTERS)
    except OSError as error:
        raise UsageError(f"--token {file} cannot be read ({error.strerror}): {_HOW_TO_MAKE_ONE}") from None
