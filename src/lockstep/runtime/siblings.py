"""How ranks of one parent find rank 0 on this host when nobody gave them an address.

Ranks that the user's own code spawned, or that mpirun started on one host, share a parent but no
port. Rank 0 binds a free loopback port, and says so by the name of a file in a directory that only
this user can read; the others look there. The name also says which process has made the file, so
that one of a dead process is recognised, and removed.

    port-PID-STARTED-PORT-KEY
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path

from lockstep.errors import LockstepError
from lockstep.runtime.private import owner_lives, start_time, user_directory

_JOB_NAMES = ("PMIX_NAMESPACE", "PMI_PORT", "OMPI_MCA_ess_base_jobid")
_PAUSE_SECONDS = 0.01


def key(env: Mapping[str, str]) -> str:
    """A name that all ranks of this job compute alike, and no other job does.

    MPI launchers name the job in `env` (their ranks may have different parents); otherwise it is
    this process's parent.
    """
    for name in _JOB_NAMES:
        if env.get(name):
            return hashlib.sha256(f"{name}={env[name]}".encode()).hexdigest()[:32]
    parent = os.getppid()
    return f"{parent}-{start_time(parent)}"


def publish(key: str, port: int) -> None:
    """Rank 0: leave `port` for the others. Replaces what it has left under this key, and removes
    what dead processes have left under any.
    """
    withdraw(key)
    for file in user_directory().glob("port-*"):
        if not owner_lives(file):
            file.unlink(missing_ok=True)
    Path(user_directory(), f"port-{os.getpid()}-{start_time(os.getpid())}-{port}-{key}").touch()


def find(key: str, timeout: timedelta) -> int:
    """The others: the port that a living rank 0 has left, waiting for it up to `timeout`.

    Raises:
        LockstepError: nothing was left in time.
    """
    deadline = time.monotonic() + timeout.total_seconds()
    while (file := next(filter(owner_lives, _files(key)), None)) is None:
        if time.monotonic() > deadline:
            raise LockstepError("rank-0-not-found", seconds=timeout.total_seconds())
        time.sleep(_PAUSE_SECONDS)
    return int(file.name.split("-")[3])


def withdraw(key: str) -> None:
    """Rank 0: remove the file, if it is this process's."""
    for file in _files(key, os.getpid()):
        file.unlink(missing_ok=True)


def _files(key: str, pid: int | str = "*") -> Iterator[Path]:
    return user_directory().glob(f"port-{pid}-*-*-{key}")
