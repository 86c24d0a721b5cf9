"""The token: where it may come from, and what is refused."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import pytest

from lockstep.errors import UsageError
from lockstep.launcher.hosts.token import DESCRIPTOR, Token


def file(folder: Path, text: str, mode: int = 0o600) -> Path:
    path = folder / "token"
    path.write_text(text)
    path.chmod(mode)
    return path


def test_one_file_is_one_job_and_the_name_does_not_hold_the_secret(tmp_path: Path) -> None:
    secret = secrets.token_hex(32)
    first, again = Token.read(file(tmp_path, secret), {}), Token.read(file(tmp_path, f"  {secret}\n"), {})
    assert first.job == again.job
    assert first.job not in secret
    assert first.job != Token(b"x" * 32).job
    assert len({first.session("a", "b"), first.session("a", "c"), first.session("c", "b"), Token(b"x" * 32).session("a", "b")}) == 4


@pytest.mark.parametrize(
    ("text", "mode", "message"),
    [
        ("ab" * 32, 0o640, r"--token .*token has mode 0640 and can be read by others than its owner: chmod 600"),
        ("ab" * 32, 0o604, r"has mode 0604"),
        ("ab" * 31, 0o600, r"--token .*token holds 31 bytes and needs at least 32: make one with"),
        ("", 0o600, r"holds 0 bytes"),
        ("secret!" * 20, 0o600, r"holds something else than hexadecimal digits: make one with"),
    ],
)
def test_what_is_no_secret_is_refused(tmp_path: Path, text: str, mode: int, message: str) -> None:
    with pytest.raises(UsageError, match=message) as raised:
        Token.read(file(tmp_path, text, mode), {})
    assert "secret!" not in str(raised.value)
    assert "abab" not in str(raised.value)


def test_none_at_all_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--nodes over several hosts needs a secret .*: give --token FILE; make one with"):
        Token.read(None, {})
    with pytest.raises(UsageError, match=r"--token .*nowhere cannot be read \(No such file or directory\)"):
        Token.read(tmp_path / "nowhere", {})


def test_a_descriptor_is_read_once_and_closed(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.write(writing, b"ab" * 32)
    os.close(writing)
    env = {DESCRIPTOR: str(reading), "OTHER": "1"}
    assert Token.read(None, env).job == Token(b"\xab" * 32).job
    assert env == {"OTHER": "1"}
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(reading)
    with pytest.raises(UsageError, match=f"{DESCRIPTOR}={reading} cannot be read .*: give the number of an open descriptor"):
        Token.read(None, {DESCRIPTOR: str(reading)})
