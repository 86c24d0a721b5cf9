"""Which addresses lead to the launcher's store, and for whom."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lockstep.runtime import launched
from lockstep.runtime.launched import Launcher
from tests.runtime.variables import variables


def test_an_address_that_leads_there() -> None:
    for own, address, port, holds in (
        ("127.0.0.1", "127.0.0.1", 29400, True),
        ("127.0.0.1", "localhost", 29400, True),
        ("127.0.0.1", "127.0.0.1", 12355, False),
        ("127.0.0.1", "127.0.0.2", 29400, False),
        ("127.0.0.1", None, 29400, False),
        ("node1", "node1", 29400, True),
        ("node1", "localhost", 29400, False),
    ):
        launcher = Launcher(own, "29400", Path("/run"), os.getpid())
        assert launcher.holds(address, port) is holds, (own, address, port)
    # a process that the rank forks is no rank
    of_a_parent = Launcher("127.0.0.1", "29400", Path("/run"), os.getppid())
    assert not of_a_parent.holds("127.0.0.1", 29400)


def test_the_environment_may_name_another_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launched, "_launcher", None)
    own = variables("MASTER_ADDR=127.0.0.1 MASTER_PORT=29400")
    assert launched.launcher(own) is None
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    remembered = launched.remember_launcher(Path("/run"))
    assert launched.launcher(own) == remembered
    for other in ({**own, "MASTER_PORT": "12355"}, {"MASTER_ADDR": "127.0.0.1"}, {}):
        assert launched.launcher(other) is None
