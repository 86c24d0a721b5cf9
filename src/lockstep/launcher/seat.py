"""The settings that a process gets before it begins, and how a process forked from a warm server
becomes equal to a fresh one.

A fresh process inherits its environment, working directory, umask, resource limits, niceness,
signals and streams from the process that starts it. A forked process inherits those of the fork
server, which may be older. So the launcher's own settings travel with the work, in a `Seat`.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import re
import resource
import signal
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from lockstep.runtime.process_lifetime import PARENT, die_with_parent

_LIMITS = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]

_WHOLE = b"\1"

inherited: list[int] = []
"""In a process started from a `Seat`: the descriptors that its launcher has passed on after the
three streams.
"""

forked = False
"""Whether this process was forked from a warm server."""

set_by_imports: dict[str, str] = {}
"""Environment variables that modules set when they were imported here. A process forked from this
one gets them too.
"""


@contextmanager
def keeping_variables() -> Iterator[None]:
    """Record the environment variables that are new at the block's end, for processes forked from
    this one.
    """
    before = [*os.environ]
    yield
    set_by_imports.update({name: os.environ[name] for name in os.environ if name not in before})


def anonymous_file() -> int:
    """Return a descriptor of a file without a name, in memory if the system can. A parent and its
    children exchange data through it.
    """
    if sys.platform == "linux":
        return os.memfd_create("lockstep", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def write_whole(file: int, data: bytes) -> None:
    """Write `data` to an anonymous file that is still empty, and mark it as complete."""
    with os.fdopen(os.dup(file), "wb") as stream:
        stream.write(b"\0")
        stream.write(data)
    os.pwrite(file, _WHOLE, 0)


def is_whole(file: int) -> bool:
    """Whether the file has been written to the end."""
    return os.pread(file, 1, 0) == _WHOLE


def read_whole(file: int) -> bytes:
    """Return what was written, at whatever position other users of the file have read."""
    parts, place, size = [], 1, os.fstat(file).st_size
    while place < size:  # the system reads 2 GiB at most at once
        parts.append(os.pread(file, size - place, place))
        place += len(parts[-1])
    return b"".join(parts)


def _limits() -> dict[int, tuple[int, int]]:
    return {limit: resource.getrlimit(limit) for limit in _LIMITS}


def _umask() -> int:
    now = os.umask(0o077)
    os.umask(now)
    return now


def _ignored() -> list[int]:
    """Return the ignored signals, without those that Python itself ignores."""
    theirs = set(signal.Signals) - {signal.SIGPIPE, signal.SIGXFSZ}
    return sorted(int(number) for number in theirs if signal.getsignal(number) is signal.SIG_IGN)


@dataclass(frozen=True, kw_only=True, slots=True)
class Seat:
    """A process to start: its work, as its main program, and its settings. Settings that are not
    given are this process's own.

    A seat is pickled on its way.
    """

    work: Callable[[], None]
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    directory: str = field(default_factory=os.getcwd)
    umask: int = field(default_factory=_umask)
    limits: Mapping[int, tuple[int, int]] = field(default_factory=_limits)
    blocked: Collection[int] = field(
        default_factory=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, [])
    )
    """The blocked signals."""
    ignored: Collection[int] = field(default_factory=_ignored)
    """The ignored signals."""
    nice: int = field(default_factory=lambda: os.nice(0))

    def take(self, parent: int, descriptors: Sequence[int]) -> None:
        """Apply the settings to this process, a child of `parent`. The first three of `descriptors`
        become its streams.
        """
        os.environ.clear()
        os.environ.update({**set_by_imports, **self.environment, PARENT: str(parent)})
        die_with_parent(parent)
        for stream, descriptor in enumerate(descriptors[:3]):
            os.dup2(descriptor, stream)
            os.close(descriptor)
        inherited[:] = descriptors[3:]
        os.chdir(self.directory)
        os.umask(self.umask)
        for limit, values in self.limits.items():
            with suppress(ValueError, OSError):
                # a hard limit that this process may not raise again
                resource.setrlimit(limit, values)
        with suppress(PermissionError):  # this process may only raise its niceness
            os.nice(self.nice - os.nice(0))
        for number in {*_ignored(), *self.ignored}:
            usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            signal.signal(number, signal.SIG_IGN if number in self.ignored else usual)
        signal.pthread_sigmask(signal.SIG_SETMASK, self.blocked)


def refresh() -> None:
    """After a fork: renew what a fresh process would have of its own (authentication key, random
    states). `random` has already reseeded itself.
    """
    global forked
    forked = True
    multiprocessing.current_process().authkey = os.urandom(32)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.seed()
    gc.enable()


_LIBRARIES = r"(?:OMP|GOMP|KMP|MKL|OPENBLAS|TRITON|ATEN|PYTORCH|TORCH(?!ELASTIC))_?[A-Z0-9_]*"
_ACTS_AT_START = re.compile(rf"PYTHON|LD_|MALLOC_|GLIBC_|{_LIBRARIES}")
_SET_BY_SCRIPT = re.compile(
    rf"""(?:environ\s*\[|setdefault\(|putenv\()\s*["']({_LIBRARIES})["']|environ\.update\([^)]*?\b({_LIBRARIES})\b"""
)


def acting(environment: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return the variables that take effect when an interpreter or a library starts. Other values
    of them need another server.
    """
    return sorted(
        (name, value) for name, value in environment.items() if _ACTS_AT_START.match(name)
    )


def with_huge_pages(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment for a new interpreter in which glibc asks the kernel for huge pages.
    Every step allocates its gradients anew, and pages of 4 KiB, each cleared at its first use, cost
    a third of a small step.

    A user's own setting of glibc's tunables stays.
    """
    return {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1", **environment}


def set_by(script: Path) -> str:
    """Return the first variable that a script sets itself and that takes effect when a library
    starts. "" if there is none, or if the file is no text.
    """
    try:
        found = _SET_BY_SCRIPT.search(script.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):
        return ""
    return "" if found is None else found[1] or found[2]


def flags() -> list[str]:
    """Return this interpreter's flags, to start another one with them. -P is left out: the caller
    adds it if the program needs it.
    """
    import subprocess

    # as multiprocessing does
    known: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    options = [
        name if value is True else f"{name}={value}" for name, value in sys._xoptions.items()
    ]
    known = [flag for flag in known if flag != "-P"]
    return [*known, *(part for option in options if option not in known for part in ("-X", option))]


def forks(environment: Mapping[str, str]) -> bool:
    """Whether ranks may be forked by an interpreter like this one: it is CPython on Linux, and its
    imports are not traced.
    """
    watched = (
        sys.flags.verbose
        or "importtime" in sys._xoptions
        or (environment.get("PYTHONPROFILEIMPORTTIME") and not sys.flags.ignore_environment)
    )
    return sys.platform == "linux" and sys.implementation.name == "cpython" and not watched
