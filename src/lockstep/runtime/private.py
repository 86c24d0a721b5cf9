"""Files on this host that only this user can see, and that are removed even if their owner is
killed.

All are in one directory of mode 0700. A file that belongs to one process has its pid and start time
in its name or content, so that the next process can recognize what dead processes have left.
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

# maximum bytes of a Unix socket's address on macOS, with its final 0; Linux allows 108
_LONGEST_ADDRESS = 104
_SHARED_MEMORY = Path("/dev/shm")


def user_directory() -> Path:
    """Return this user's own directory for short-lived files. Raises LockstepError if another user
    owns it or can open it.
    """
    path = Path(tempfile.gettempdir()) / f"lockstep-{os.getuid()}"
    path.mkdir(mode=0o700, exist_ok=True)
    status = path.lstat()
    private = stat.S_ISDIR(status.st_mode) and not status.st_mode & 0o077
    if not private or status.st_uid != os.getuid():
        raise LockstepError("directory-not-private", path=str(path))
    return path


@contextmanager
def run_directory() -> Iterator[Path]:
    """Yield a new empty directory for one run of this process, and remove it at the end. First
    remove those of killed processes.
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
    """Remove a run's directory and what its loader workers left in /dev/shm; its processes have
    ended. Each loader worker has a file in it, with its pid in the name (stalls.stack_of).
    """
    with suppress(FileNotFoundError):  # another launcher removes it, too
        names = [file.suffixes[-2] for file in directory.glob("rank-*.worker-*.now")]
        remove_torch_names([int(name.removeprefix(".worker-")) for name in names])
    shutil.rmtree(directory, ignore_errors=True)


def remove_torch_names(pids: Collection[int]) -> None:
    """Remove what these processes have left in /dev/shm, if they have ended.

    A process that sends a tensor to another gives its memory a name, torch_PID_..., for a moment.
    If it is killed in that moment, the name stays.
    """
    if sys.platform != "linux":
        return
    dead = {str(pid) for pid in pids if start_time(pid) == 0}
    if not dead:
        return
    for file in _SHARED_MEMORY.glob("torch_*_*"):
        if file.name.split("_")[1] in dead:
            with suppress(OSError):  # it belongs to another user, or is already removed
                file.unlink()


def new_directory(home: Path, kind: str) -> Path:
    """Create a directory in `home` whose name carries this process's pid and start time."""
    return Path(tempfile.mkdtemp(prefix=_owned(kind), dir=home))


def new_file(home: Path, kind: str) -> Path:
    """Create an empty file in `home` whose name carries this process's pid and start time."""
    descriptor, path = tempfile.mkstemp(prefix=_owned(kind), dir=home)
    os.close(descriptor)
    return Path(path)


def _owned(kind: str) -> str:
    return f"{kind}-{os.getpid()}-{start_time(os.getpid())}-"


def sockets_into(directory: Path) -> None:
    """Make multiprocessing put the sockets of this process and its children into `directory`: each
    loader worker has one. The caller must have `directory` removed.

    multiprocessing would create a directory for them and remove it at an orderly exit. A rank does
    not exit that way: its workers are killed. If the path is too long for a socket's address,
    multiprocessing keeps its own directory.
    """
    if len(os.fsencode(directory)) + len("/listener-12345678") < _LONGEST_ADDRESS:
        process: Any = multiprocessing.current_process()
        process._config["tempdir"] = str(directory)


def owner_lives(path: Path) -> bool:
    """Whether the process that created `path` with `new_directory` or `new_file` still runs."""
    try:
        _, pid, started, *_ = path.name.split("-")
        return start_time(int(pid)) == int(started)
    except ValueError:  # another name
        return False


def start_time(pid: int) -> int:
    """Return when the process started, in the system's own units. 0: it is not running, or is a
    zombie. 1: it runs, and the system does not give the time.
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
