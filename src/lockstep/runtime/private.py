"""Files on this host that only this user may see, and that are removed although their owner may be
killed at any time.

Everything lies in one directory of mode 0700. What belongs to one process carries its pid and start
time in its name or content, so that the next process can tell what the dead have left.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from lockstep.errors import LockstepError

# bytes of a Unix socket's, the 0 at its end included: on macOS; Linux has 108
_LONGEST_ADDRESS = 104
_SHARED_MEMORY = Path("/dev/shm")


def user_directory() -> Path:
    """This user's own directory for short-lived files; refused if somebody else made it first or
    can open it.
    """
    path = Path(tempfile.gettempdir()) / f"lockstep-{os.getuid()}"
    path.mkdir(mode=0o700, exist_ok=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise LockstepError("directory-not-private", path=str(path))
    return path


@contextmanager
def run_directory() -> Iterator[Path]:
    """A new empty directory for one run of this process, removed at the end; those of killed
    processes are removed first.
    """
    home = user_directory()
    for old in home.glob("run-*"):
        if not owner_lives(old):
            _remove_run(old)
    path = new_directory(home, "run")
    try:
        yield path
    finally:
        _remove_run(path)


def _remove_run(directory: Path) -> None:
    """Its processes have ended. Each loader worker has a file there, with its pid in the name
    (stalls.stack_of).
    """
    remove_torch_names(
        [
            int(file.suffixes[-2].removeprefix(".worker-"))
            for file in directory.glob("rank-*.worker-*.now")
        ]
    )
    shutil.rmtree(directory, ignore_errors=True)


def remove_torch_names(pids: Collection[int]) -> None:
    """Remove what these processes, as far as they have ended, have left in /dev/shm.

    A process that hands a tensor over gives its memory a name, torch_PID_..., for a moment. One
    that is killed in that moment leaves it there.
    """
    if sys.platform != "linux":
        return
    dead = {pid for pid in pids if start_time(pid) == 0}
    for file in _SHARED_MEMORY.glob("torch_*_*") if dead else ():
        maker = file.name.split("_")[1]
        if maker.isdigit() and int(maker) in dead:
            with suppress(OSError):  # another user's, or somebody else has removed it
                file.unlink()


def new_directory(home: Path, kind: str) -> Path:
    """A directory in `home` whose name says that it is this process's."""
    return Path(
        tempfile.mkdtemp(prefix=f"{kind}-{os.getpid()}-{start_time(os.getpid())}-", dir=home)
    )


def sockets_into(directory: Path) -> None:
    """Have the sockets of this process and of those it starts lie in `directory`, which somebody
    removes: loader workers have one each.

    multiprocessing makes a directory for them that it removes at an orderly end, and a rank that
    leaves has none: its workers are killed. Where the path is too long for a socket's address, that
    directory stays.
    """
    if len(os.fsencode(directory)) + len("/listener-12345678") < _LONGEST_ADDRESS:
        process: Any = multiprocessing.current_process()
        process._config["tempdir"] = str(directory)


def owner_lives(path: Path) -> bool:
    """Whether the process that made `path` with `new_directory` still runs."""
    _, pid, started, *_ = [*path.name.split("-"), "", ""]
    return pid.isdigit() and str(start_time(int(pid))) == started


def start_time(pid: int) -> int:
    """When the process started, in the system's own units; 0 if it is not running (or is a
    zombie), 1 where the system does not say.
    """
    if sys.platform == "linux":
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return 0
        return 0 if fields[0] in "ZX" else int(fields[19])
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return 0
    except PermissionError:
        pass
    return 1
