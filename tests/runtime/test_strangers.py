"""Another user of this host at a port that a library opened is noticed."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from lockstep.errors import LockstepError
from lockstep.runtime.strangers import no_strangers, owners
from tests.refused import refused

NOBODY = 65534


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_owner_of_a_connection(family: socket.AddressFamily) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    with listener, socket.socket(family) as caller:
        host = "127.0.0.1" if family == socket.AF_INET else "::ffff:127.0.0.1"
        caller.connect((host, listener.getsockname()[1]))
        accepted, address = listener.accept()
        with accepted:
            assert owners([(address, accepted.getsockname())]) == [{os.getuid()}]
            caller.close()
            assert owners([(address, accepted.getsockname())]) == [set()]


def _call_as_nobody(port: int) -> subprocess.Popen[str]:
    code = (
        f"import os, socket; os.setuid({NOBODY}); s = socket.socket(); s.connect(('127.0.0.1',"
        f" {port})); print('here', flush=True); input()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "here\n"
    return process


@pytest.mark.rest
@pytest.mark.skipif(os.getuid() != 0, reason="only root can start a process as another user")
def test_a_stranger_at_a_port_that_a_library_opened_is_named() -> None:
    def open_and_accept(opened: list[Any]) -> None:
        with no_strangers("a library"):
            opened.append(socket.create_server(("127.0.0.1", 0)))
            opened.append(_call_as_nobody(opened[0].getsockname()[1]))
            opened.append(opened[0].accept()[0])

    opened: list[Any] = []
    with refused("caller-of-another-user", LockstepError, user=NOBODY, what="a library"):
        open_and_accept(opened)
    listener, stranger, accepted = opened
    with stranger:
        stranger.kill()
    accepted.close()
    listener.close()


def test_only_the_sockets_of_this_process_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tables of the system list those of all ranks."""
    tables: list[Path] = []
    read_text = Path.read_text

    def read(path: Path, *args: Any) -> str:
        tables.append(path)
        return read_text(path, *args)

    monkeypatch.setattr(Path, "read_text", read)
    monkeypatch.setattr(psutil.Process, "net_connections", None)
    with socket.create_server(("127.0.0.1", 0)), no_strangers("a library"):
        listener = socket.create_server(("127.0.0.1", 0))
    assert not tables, "nobody has called"
    with listener, no_strangers("a library"):
        caller = socket.create_connection(listener.getsockname())
        accepted, _ = listener.accept()
    with caller, accepted:
        assert not tables, "the port was open before"
    with no_strangers("a library"):
        listener = socket.create_server(("127.0.0.1", 0))
        caller = socket.create_connection(listener.getsockname())
        accepted, _ = listener.accept()
    with listener, caller, accepted:
        assert tables == [Path("/proc/net/tcp"), Path("/proc/net/tcp6")]
