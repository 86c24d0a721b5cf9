"""The ranks' store: this user's processes use it as any TCPStore; another user's can neither
read nor write it, nor take part.
"""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from lockstep import testing
from lockstep.errors import LockstepError
from lockstep.runtime.host_store import HostStore, no_strangers, owners
from lockstep.world.world import World
from tests.refused import refused

NOBODY = 65534
AS_NOBODY = pytest.mark.skipif(
    os.getuid() != 0, reason="only root can start a process as another user"
)
# What any program can do: it speaks the store's protocol, or connects to whatever listens.
_ATTACK = """
import os, socket, sys
from datetime import timedelta
import torch.distributed as dist
os.setgid({nobody}); os.setuid({nobody})
port = int(sys.argv[1])
try:
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=2))
    store.set("planted", "1")
    print("read", store.get("secret"), store.list_keys())
except dist.DistError as error:
    print("refused")
behind = socket.socket()
behind.settimeout(1)
try:
    behind.connect(("127.0.0.2", port))
    print("behind the gate")
except OSError:
    print("refused")
"""


@pytest.fixture
def host() -> Iterator[HostStore]:
    found = HostStore()
    yield found
    found.close()


def _client(host: HostStore) -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", host.port, is_master=False, timeout=timedelta(seconds=30))


def test_processes_of_this_user_share_it(host: HostStore) -> None:
    clients = [_client(host) for _ in range(3)]
    large = os.urandom(5_000_000)
    clients[0].set("large", large)  # type: ignore[arg-type]  # torch says text, and takes both
    assert clients[1].get("large") == large
    assert [client.add("count", 1) for client in clients] == [1, 2, 3]
    del clients[0]
    host.store.set("late", "1")
    clients[0].wait(["late"], timedelta(seconds=30))
    assert clients[0].compare_set("late", "1", "2") == b"2"


def test_a_client_that_leaves_does_not_take_its_last_word_along(host: HostStore) -> None:
    code = (
        "import sys, torch.distributed as d; d.TCPStore('127.0.0.1', int(sys.argv[1]),"
        " is_master=False).set('last', 'word')"
    )
    subprocess.run([sys.executable, "-c", code, str(host.port)], check=True)
    assert host.store.get("last") == b"word"


def test_closed_it_is_gone_for_everybody() -> None:
    host = HostStore()
    client = _client(host)
    client.set("here", "1")
    host.close()
    with pytest.raises(dist.DistError):
        client.get("here")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", host.port))


@AS_NOBODY
def test_another_user_can_neither_read_nor_write(
    host: HostStore, capfd: pytest.CaptureFixture[str]
) -> None:
    host.store.set("secret", "1")
    code = _ATTACK.format(nobody=NOBODY)
    said = subprocess.run(
        [sys.executable, "-c", code, str(host.port)], capture_output=True, text=True, check=True
    ).stdout
    assert said.split("\n") == ["refused", "refused", ""]
    assert not host.store.check(["planted"])
    assert host.store.get("secret") == b"1"
    assert f"user {NOBODY} " in capfd.readouterr().err


def test_what_stands_behind_the_gate_hears_nobody_else(host: HostStore) -> None:
    """Also not this user: so that it is the gate, and not a guess, that decides."""
    with socket.socket() as caller:
        caller.settimeout(0.5)
        with pytest.raises(TimeoutError):
            caller.connect(("127.0.0.2", host.port))


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


@AS_NOBODY
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


def _attack_from_rank_1(world: World) -> str:
    said = ""
    if world.rank == 1:
        code = _ATTACK.format(nobody=NOBODY)
        arguments = [sys.executable, "-c", code, os.environ["MASTER_PORT"]]
        said = subprocess.run(arguments, capture_output=True, text=True, check=True).stdout
    world.barrier()
    return said


@AS_NOBODY
def test_the_store_of_running_ranks_is_closed_too() -> None:
    assert testing.run_ranks(_attack_from_rank_1, 2) == ["", "refused\nrefused\n"]


def test_an_unfinished_request_of_one_client_holds_nobody_up(host: HostStore) -> None:
    with socket.create_connection(("127.0.0.1", host.port)) as slow:
        slow.sendall(struct.pack("=B", 0))
        assert _client(host).add("count", 1) == 1
