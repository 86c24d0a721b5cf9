"""What a process is told before it begins, and how one that was forked from a warm server becomes
as good as a fresh one.

A fresh process inherits its environment, working directory, umask, resource limits, niceness,
signals and streams from whoever starts it. A forked one inherits the fork server's, which may be
older: so the launcher's own travel with the work, in a `Seat`.
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
"""In such a process: the descriptors that its launcher has passed on beside the three streams."""

forked = False
"""Whether this process was forked from a warm server."""

set_by_imports: dict[str, str] = {}
"""Environment variables that modules have set as they were imported here: a process forked from
this one has them too.
"""


@contextmanager
def keeping_variables() -> Iterator[None]:
    """The environment variables that are new at the block's end are those of processes forked
    from this one, too.
    """
    before = [*os.environ]
    yield
    set_by_imports.update({name: os.environ[name] for name in os.environ if name not in before})


def anonymous_file() -> int:
    """A descriptor of a file without a name, for what a parent and its children hand each other;
    in memory where the system can.
    """
    if sys.platform == "linux":
        return os.memfd_create("lockstep", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def write_whole(file: int, data: bytes) -> None:
    """Into an anonymous file that is still empty."""
    with os.fdopen(os.dup(file), "wb") as stream:
        stream.write(b"\0")
        stream.write(data)
    os.pwrite(file, _WHOLE, 0)


def is_whole(file: int) -> bool:
    """Whether somebody has written it to the end."""
    return os.pread(file, 1, 0) == _WHOLE


def read_whole(file: int) -> bytes:
    """What was written, wherever others that share the file have read up to."""
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
    """Less those that Python itself ignores."""
    theirs = set(signal.Signals) - {signal.SIGPIPE, signal.SIGXFSZ}
    return sorted(int(number) for number in theirs if signal.getsignal(number) is signal.SIG_IGN)


@dataclass(frozen=True, kw_only=True, slots=True)
class Seat:
    """A process to start: what it does, as its main program, and in what surroundings. Those that
    are not named are this process's own.

    Pickled on its way.
    """

    work: Callable[[], None]
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    directory: str = field(default_factory=os.getcwd)
    umask: int = field(default_factory=_umask)
    limits: Mapping[int, tuple[int, int]] = field(default_factory=_limits)
    blocked: Collection[int] = field(
        default_factory=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, [])
    )
    """Signals."""
    ignored: Collection[int] = field(default_factory=_ignored)
    """Signals."""
    nice: int = field(default_factory=lambda: os.nice(0))

    def take(self, parent: int, descriptors: Sequence[int]) -> None:
        """Have this process, a child of `parent`, stand as the launcher wants it. The first
        three of `descriptors` become its streams.
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
        with suppress(PermissionError):  # only the other way is allowed
            os.nice(self.nice - os.nice(0))
        for number in {*_ignored(), *self.ignored}:
            usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            signal.signal(number, signal.SIG_IGN if number in self.ignored else usual)
        signal.pthread_sigmask(signal.SIG_SETMASK, self.blocked)


def refresh() -> None:
    """After a fork: what a fresh process would have of its own. `random` has seeded itself anew
    already.
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
    """The variables that act as an interpreter or a library starts: for other values of them
    there must be another server.
    """
    return sorted(
        (name, value) for name, value in environment.items() if _ACTS_AT_START.match(name)
    )


def with_huge_pages(environment: Mapping[str, str]) -> dict[str, str]:
    """For a new interpreter: glibc asks the kernel for huge pages. Every step makes its gradients
    anew, and pages of 4 KiB, each cleared when it is first touched, cost a third of a small step.

    What the user says of glibc's tunables stands.
    """
    return {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1", **environment}


def set_by(script: Path) -> str:
    """The first variable that a script sets itself and that acts as a library starts; "" for
    none, and where the file is no text.
    """
    try:
        found = _SET_BY_SCRIPT.search(script.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):
        return ""
    return "" if found is None else found[1] or found[2]


def flags() -> list[str]:
    """This interpreter's own, for another one; but for -P, which whoever starts one gives it as
    the program needs it.
    """
    import subprocess

    known: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]  # as multiprocessing does
    options = [
        name if value is True else f"{name}={value}" for name, value in sys._xoptions.items()
    ]
    known = [flag for flag in known if flag != "-P"]
    return [*known, *(part for option in options if option not in known for part in ("-X", option))]


def forks(environment: Mapping[str, str]) -> bool:
    """Whether ranks may be forked by an interpreter like this one: it is CPython on Linux, and
    nobody watches its imports.
    """
    watched = (
        sys.flags.verbose
        or "importtime" in sys._xoptions
        or (environment.get("PYTHONPROFILEIMPORTTIME") and not sys.flags.ignore_environment)
    )
    return sys.platform == "linux" and sys.implementation.name == "cpython" and not watched
