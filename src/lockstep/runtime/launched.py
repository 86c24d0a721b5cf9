"""What a rank knows of the launcher that started it.

These are no environment variables. Every process that the rank starts would inherit them, and would
take itself for a rank of the launcher.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Launcher:
    """The rendezvous that the launcher offers to one rank."""

    address: str
    """MASTER_ADDR as the launcher set it: there it holds a TCPStore for plain scripts."""
    port: str
    """MASTER_PORT as the launcher set it."""
    directory: Path
    """A directory that only this user can open. The ranks of this host share it, and
    `lockstep.init()` joins them through a FileStore in it.
    """
    rank_pid: int

    def holds(self, address: str | None, port: object) -> bool:
        """Whether the launcher's TCPStore is at this address. False in a process that the rank has
        forked: it is no rank of the launcher.
        """
        same_address = address == self.address
        if self.address == LOOPBACK and address == "localhost":
            same_address = True
        return same_address and str(port) == self.port and os.getpid() == self.rank_pid


_launcher: Launcher | None = None


def remember_launcher(directory: Path) -> Launcher:
    """Note the launcher's address from the environment, before the user's program can change it."""
    global _launcher
    _launcher = Launcher(
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"], directory, os.getpid()
    )
    return _launcher


def launcher(env: Mapping[str, str]) -> Launcher | None:
    """Return the launcher of this rank. None if this process was not started as a rank, or if
    MASTER_ADDR and MASTER_PORT are no longer the launcher's.
    """
    if _launcher is None:
        return None
    unchanged = _launcher.holds(env.get("MASTER_ADDR"), env.get("MASTER_PORT"))
    return _launcher if unchanged else None
