"""How ranks of one parent find rank 0 on this host when nobody gave them an address.

Ranks that the user's own code spawned, or that mpirun started on one host, share a parent but no port. Rank 0 binds a free
loopback port and leaves its number in a directory that only this user can read; the others look there. An entry names the
process that wrote it by pid and start time, so that one left by a dead process is recognised, and removed.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

from lockstep.errors import LockstepError
from lockstep.launcher.private import start_time, user_directory

_JOB_NAMES = ("PMIX_NAMESPACE", "PMI_PORT", "OMPI_MCA_ess_base_jobid")
_PAUSE_SECONDS = 0.01


def key(env: Mapping[str, str]) -> str:
    """A name that all ranks of this job compute alike, and no other job does.

    MPI launchers name the job in `env` (their ranks may have different parents); otherwise it is this process's parent.
    """
    for name in _JOB_NAMES:
        if env.get(name):
            return hashlib.sha256(f"{name}={env[name]}".encode()).hexdigest()[:32]
    parent = os.getppid()
    return f"{parent}-{start_time(parent)}"


def publish(key: str, port: int) -> None:
    """Rank 0: leave `port` for the others. Replaces what stood under this key and removes what dead processes left under any."""
    _sweep()
    entry = {"port": port, "pid": os.getpid(), "started": start_time(os.getpid())}
    handle, unfinished = tempfile.mkstemp(dir=user_directory(), prefix=".")
    with os.fdopen(handle, "w") as file:
        json.dump(entry, file)
    os.replace(unfinished, user_directory() / key)


def find(key: str, timeout: timedelta) -> int:
    """The others: the port that a living rank 0 has left, waiting for it up to `timeout`.

    Raises:
        LockstepError: nothing was left in time.
    """
    deadline = time.monotonic() + timeout.total_seconds()
    while (port := _look(key)) is None:
        if time.monotonic() > deadline:
            raise LockstepError(
                f"rank 0 of this job has not shown up on this host within {timeout.total_seconds():g} s; "
                "start all ranks from one parent process, or set MASTER_ADDR and MASTER_PORT"
            )
        time.sleep(_PAUSE_SECONDS)
    return port


def withdraw(key: str) -> None:
    """Rank 0: remove the entry, if it is this process's."""
    file = user_directory() / key
    entry = _read(file)
    if entry is not None and entry["pid"] == os.getpid():
        file.unlink(missing_ok=True)


def _look(key: str) -> int | None:
    entry = _read(user_directory() / key)
    return entry["port"] if entry is not None and _alive(entry) else None


def _read(file: Path) -> dict[str, int] | None:
    try:
        entry = json.loads(file.read_text())
        return {name: int(entry[name]) for name in ("port", "pid", "started")}
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _alive(entry: Mapping[str, int]) -> bool:
    return start_time(entry["pid"]) == entry["started"]


def _sweep() -> None:
    """Remove entries of dead processes. Each is first moved aside: a living one that took its place meanwhile is put back."""
    for file in user_directory().iterdir():
        entry = _read(file)
        if not file.is_file() or file.name.startswith(".") or (entry is not None and _alive(entry)):
            continue
        aside = file.with_name(f".{file.name}-{os.getpid()}")
        with suppress(OSError):  # another rank 0 sweeps too
            file.rename(aside)
            entry = _read(aside)
            if entry is not None and _alive(entry):
                os.link(aside, file)
            aside.unlink()
