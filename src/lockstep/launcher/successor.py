"""Restarts without imports: a fork server that has also imported what the user's own files import.

1. The first rank of a host leaves the names of the modules that loading its task has imported.
2. Once the ranks train, the fork server forks its *successor*, a fork server too. It imports these
  modules, and checks what that has done.
3. At a restart ranks are forked from the successor, if they are as good as fresh processes. If not,
  it is ended.

Forked ranks are not as good if the import of a module starts a thread or a process, opens a file, a
socket or a GPU, or reads a variable such as RANK, because the successor is no rank. The same is
true if the file of a module has changed since.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from lockstep.launcher import failures
from lockstep.launcher import seat as seats
from lockstep.runtime.disk import write_whole

_FILE = "imports.json"


@dataclass(frozen=True, slots=True)
class Imports:
    """Modules in the order in which they were imported, and the path on which they are found."""

    path: list[str]
    names: list[str]

    @classmethod
    def read(cls, directory: Path) -> Imports | None:
        """Read what a rank has left in its launcher's directory; None if there is nothing."""
        with suppress(FileNotFoundError):
            return cls(**json.loads((directory / _FILE).read_text(encoding="utf-8")))
        return None


@contextmanager
def noted(file: Path) -> Iterator[None]:
    """In a host's first rank: tell the launcher which modules the block imports, without the user's
    `file` itself. Other ranks tell nothing.
    """
    before = set(sys.modules)
    yield
    directory = os.environ.get(failures.DIRECTORY)
    if directory is None or os.environ.get("LOCAL_RANK", "0") != "0":
        return
    names = [
        name
        for name, module in sys.modules.items()
        if name not in before and getattr(module, "__file__", None) != str(file)
    ]
    write_whole(Path(directory, _FILE), json.dumps(asdict(Imports(sys.path, names))))


@dataclass(frozen=True, slots=True)
class Warmth:
    """What a successor reports about its imports."""

    safe: bool
    versions: Mapping[str, tuple[int, int]]
    """The modules' files, each with its time of modification in ns and its size."""

    @classmethod
    def of(cls, imports: Imports, of_ranks: Collection[str], unsafe: Callable[[], str]) -> Warmth:
        """Import the modules in this process. `of_ranks`: environment variables that differ between
        ranks. `unsafe` returns why this process must not be forked.
        """
        versions, descriptors = {}, os.listdir("/proc/self/fd")
        with seats.keeping_variables(), _path(imports.path), _watched(of_ranks) as asked:
            for name in imports.names:
                with suppress(Exception):
                    module = importlib.import_module(name)
                    if (file := getattr(module, "__file__", None)) is not None:
                        versions[file] = _version(file)
        for output in (sys.stdout, sys.stderr):
            output.flush()
        opened = set(os.listdir("/proc/self/fd")) != set(descriptors)
        return cls(not (asked or unsafe() or opened or _has_children()), versions)

    def holds(self) -> bool:
        """Whether ranks may be forked from the successor: it is safe, and no file has changed."""
        return self.safe and all(
            _version(file) == version for file, version in self.versions.items()
        )


def _version(file: str) -> tuple[int, int]:
    with suppress(OSError):
        found = os.stat(file)
        return found.st_mtime_ns, found.st_size
    return 0, 0


def _has_children() -> bool:
    with suppress(ChildProcessError):
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        return True
    return False


@contextmanager
def _path(path: Iterable[str]) -> Iterator[None]:
    before = sys.path[:]
    sys.path[:] = path
    try:
        yield
    finally:
        sys.path[:] = before


@contextmanager
def _watched(names: Collection[str]) -> Iterator[list[str]]:
    """Yield a list to which the block's reads of the variables in `names`, or named LOCKSTEP_*, are
    added; "*" stands for a read of all of them.
    """
    asked: list[str] = []
    plain = type(os.environ)

    class Watched(plain):  # type: ignore[misc, valid-type]  # os._Environ
        def __getitem__(self, name: str) -> str:
            if name in names or name.startswith("LOCKSTEP_"):
                asked.append(name)
            return str(super().__getitem__(name))

        def __iter__(self) -> Iterator[str]:
            asked.append("*")
            return iter(super().__iter__())

    os.environ.__class__ = Watched
    try:
        yield asked
    finally:
        os.environ.__class__ = plain
