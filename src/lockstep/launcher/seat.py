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
import resource
import signal
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

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
