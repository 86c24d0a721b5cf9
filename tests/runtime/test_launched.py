"""Which addresses lead to the launcher's store, and for whom."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lockstep.runtime.launched import Launcher
from tests.launcher.commands import python


@pytest.mark.parametrize(
    ("own", "address", "port", "holds"),
    [
        ("127.0.0.1", "127.0.0.1", 29400, True),
        ("127.0.0.1", "localhost", 29400, True),
        ("127.0.0.1", "127.0.0.1", 12355, False),
        ("127.0.0.1", "127.0.0.2", 29400, False),
        ("127.0.0.1", None, 29400, False),
        ("node1", "node1", 29400, True),
        ("node1", "localhost", 29400, False),
    ],
)
def test_an_address_that_leads_there(own: str, address: str | None, port: int, holds: bool) -> None:
    launcher = Launcher(own, "29400", Path("/run"), os.getpid())
    assert launcher.holds(address, port) is holds


def test_a_process_that_the_rank_forks_is_no_rank() -> None:
    of_a_parent = Launcher("127.0.0.1", "29400", Path("/run"), os.getppid())
    assert not of_a_parent.holds("127.0.0.1", 29400)


def test_the_environment_may_name_another_store() -> None:
    code = (
        "from pathlib import Path; from lockstep.runtime.launched import *\n"
        "remember_launcher(Path('/run'))\n"
        "env = {'MASTER_ADDR': '127.0.0.1', 'MASTER_PORT': '29400'}\n"
        "print([launcher(variables) is not None for variables in"
        " (env, {**env, 'MASTER_PORT': '12355'}, {'MASTER_ADDR': '127.0.0.1'}, {})])"
    )
    done = python("-c", code, MASTER_ADDR="127.0.0.1", MASTER_PORT="29400")
    assert done.stdout == "[True, False, False, False]\n", done.stderr
