"""A disk that remembers what was forced to it.

Names: a folder's changes reach the disk in their order, and of several folders independently; a
change of two folders reaches both at once. Bytes: what was not forced is whole, cut, zero or as
before after the power fails. A process that is killed loses nothing that it has written.
"""

from __future__ import annotations

import errno
import io
import os
import stat
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path, PosixPath
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from lockstep.runtime import disk as door
from tests.simulation.machine import Machine

if TYPE_CHECKING:
    from tests.simulation.machine import Process


class File:
    number = 0

    def __init__(self) -> None:
        self.data = self.forced = b""
        self.owner: Process | None = None  # of its lock
        File.number += 1
        self.number = File.number


class Folder:
    def __init__(self) -> None:
        self.names: dict[str, File | Folder] = {}
        self.forced: dict[str, File | Folder] = {}
        File.number += 1
        self.number = File.number


class Disk:
    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.root = Folder()
        # changes of names, not forced: [(folder, name, what it is now or None), ...] each
        self._pending: list[list[tuple[Folder, str, File | Folder | None]]] = []
        self._streams: list[Stream] = []

    def find(self, path: Path) -> File | Folder:
        node: File | Folder = self.root
        for part in str(path).split("/")[1:]:
            if not isinstance(node, Folder):
                raise _error(errno.ENOTDIR, path)
            if part:
                if part not in node.names:
                    raise _error(errno.ENOENT, path)
                node = node.names[part]
        return node

    def folder(self, path: Path) -> Folder:
        found = self.find(path)
        if isinstance(found, File):
            raise _error(errno.ENOTDIR, path)
        return found

    def change(self, *changes: tuple[Folder, str, File | Folder | None]) -> None:
        for folder, name, node in changes:
            if node is None:
                del folder.names[name]
            else:
                folder.names[name] = node
        self._pending.append(list(changes))

    def force(self, path: Path) -> None:
        found = self.find(path)
        if isinstance(found, File):
            found.forced = found.data
            return
        folders = {found.number}
        for change in reversed(self._pending):  # what has to be there before
            if folders & {folder.number for folder, _, _ in change}:
                folders |= {folder.number for folder, _, _ in change}
        rest = []
        for change in self._pending:
            if change[0][0].number in folders:
                _apply(change)
            else:
                rest.append(change)
        self._pending = rest

    def lose_power(self) -> None:
        chance = self.machine.random
        stopped: set[int] = set()
        odds = chance.choice((0.0, 0.1, 0.5, 1.0))
        for change in self._pending:
            folders = {folder.number for folder, _, _ in change}
            if folders & stopped or chance.random() < odds:
                stopped |= folders
            else:
                _apply(change)
        self._pending = []
        self._restart(self.root)

    def _restart(self, folder: Folder) -> None:
        folder.names = dict(folder.forced)
        for node in folder.names.values():
            if isinstance(node, Folder):
                self._restart(node)
            elif node.data != node.forced:
                chance, new = self.machine.random, node.data
                node.data = node.forced = chance.choice(
                    (node.forced, new, new[: chance.randrange(len(new) + 1)], b"\0" * len(new))
                )

    def everything(self, folder: Folder | None = None, at: str = "") -> Iterator[str]:
        for name, node in sorted((folder or self.root).names.items()):
            yield f"{at}/{name}" + (f" ({len(node.data)})" if isinstance(node, File) else "/")
            if isinstance(node, Folder):
                yield from self.everything(node, f"{at}/{name}")

    def opened(self, stream: Stream) -> None:
        self._streams.append(stream)

    def release(self, process: Process) -> None:
        """Its files are closed."""
        for stream in self._streams:
            if stream.process is process:
                stream.unlock()


def _apply(change: list[tuple[Folder, str, File | Folder | None]]) -> None:
    for folder, name, node in change:
        if node is None:
            folder.forced.pop(name, None)
        else:
            folder.forced[name] = node


def _error(number: int, path: object) -> OSError:
    return OSError(number, os.strerror(number), str(path))


class Stream(io.RawIOBase):
    """An open file."""

    def __init__(self, path: SimulatedPath, file: File, *, append: bool) -> None:
        self.path, self.file, self._append, self._at = path, file, append, 0
        self.process = path.machine.running
        path.machine.disk.opened(self)

    def write(self, data: Any) -> int:
        octets, file, machine = bytes(data), self.file, self.path.machine
        machine.point("write", self.path, len(octets))
        if machine.fails():
            file.data += octets[: machine.random.randrange(len(octets) + 1)]
            raise _error(errno.ENOSPC, self.path)
        file.data += octets
        return len(octets)

    def seek(self, place: int, whence: int = 0) -> int:
        self._at = place
        return place

    def read(self, size: int | None = -1) -> bytes:
        self.path.machine.point("read", self.path)
        return self.file.data[self._at :][: None if size in (None, -1) else size]

    def truncate(self, size: int | None = None) -> int:
        self.path.machine.point("truncate", self.path)
        self.file.data = self.file.data[:size]
        return size or 0

    def unlock(self) -> None:
        if self.file.owner is self.process:
            self.file.owner = None

    def close(self) -> None:
        if not self.closed:
            self.unlock()
        super().close()


class SimulatedPath(PosixPath):
    """A path on the disk of the simulation that runs. Every method is one operation, or several
    where the real one is.
    """

    __slots__ = ()

    @property
    def machine(self) -> Machine:
        return Machine.now

    def _do(self, what: str, *more: object) -> Disk:
        Machine.now.point(what, self, *more)
        return Machine.now.disk

    def _parent(self, disk: Disk) -> Folder:
        return disk.folder(self.parent)

    def stat(self, *, follow_symlinks: bool = True) -> Any:
        node = self._do("stat").find(self)
        kind = stat.S_IFDIR if isinstance(node, Folder) else stat.S_IFREG
        size = 0 if isinstance(node, Folder) else len(node.data)
        return SimpleNamespace(st_mode=kind, st_size=size, st_dev=1, st_ino=node.number)

    def lstat(self) -> Any:
        return self.stat()

    def _kind(self, *kinds: type) -> bool:
        try:
            return isinstance(self._do("stat").find(self), kinds)
        except OSError:
            return False

    def exists(self, *, follow_symlinks: bool = True) -> bool:
        return self._kind(File, Folder)

    def is_file(self) -> bool:
        return self._kind(File)

    def is_dir(self) -> bool:
        return self._kind(Folder)

    def is_symlink(self) -> bool:
        return False

    def mkdir(self, mode: int = 0o777, parents: bool = False, exist_ok: bool = False) -> None:
        try:
            disk = self._do("mkdir")
            folder = self._parent(disk)
            if self.name in folder.names:
                raise _error(errno.EEXIST, self)
            disk.change((folder, self.name, Folder()))
        except FileNotFoundError:
            if not parents or self.parent == self:
                raise
            self.parent.mkdir(parents=True, exist_ok=True)
            self.mkdir(mode, parents=False, exist_ok=exist_ok)
        except FileExistsError:
            if not exist_ok or not self.is_dir():
                raise

    def open(self, mode: str = "r", *_: object, **__: object) -> Any:
        disk = self._do("open", mode)
        if mode == "rb":
            found = disk.find(self)
            if isinstance(found, Folder):
                raise _error(errno.EISDIR, self)
            return io.BytesIO(found.data)
        folder = self._parent(disk)
        found = folder.names.get(self.name) or File()
        if isinstance(found, Folder):
            raise _error(errno.EISDIR, self)
        if self.name not in folder.names:
            if self.machine.fails():
                raise _error(errno.ENOSPC, self)
            disk.change((folder, self.name, found))
        elif mode[0] == "w":
            found.data = b""
        return Stream(self, found, append=mode[0] == "a")

    def touch(self, mode: int = 0o666, exist_ok: bool = True) -> None:
        self.open("ab").close()

    def write_text(self, data: str, *_: object, **__: object) -> int:
        with self.open("wb") as stream:
            return int(stream.write(data.encode()))

    def read_bytes(self) -> bytes:
        return bytes(self.open("rb").getvalue())

    def read_text(self, *_: object, **__: object) -> str:
        return self.read_bytes().decode()

    def rename(self, target: Any) -> Any:
        disk = self._do("rename", target)
        node, old, new = disk.find(self), self._parent(disk), disk.folder(target.parent)
        there = new.names.get(target.name)
        if isinstance(there, Folder) and (there.names or isinstance(node, File)):
            raise _error(errno.ENOTEMPTY, target)
        if isinstance(there, File) and isinstance(node, Folder):
            raise _error(errno.ENOTDIR, target)
        disk.change((new, target.name, node), (old, self.name, None))
        return target

    replace = rename

    def unlink(self, missing_ok: bool = False) -> None:
        try:
            disk = self._do("unlink")
            if isinstance(disk.find(self), Folder):
                raise _error(errno.EISDIR, self)
            disk.change((self._parent(disk), self.name, None))
        except FileNotFoundError:
            if not missing_ok:
                raise

    def rmdir(self) -> None:
        disk = self._do("rmdir")
        if disk.folder(self).names:
            raise _error(errno.ENOTEMPTY, self)
        disk.change((self._parent(disk), self.name, None))

    def iterdir(self) -> Iterator[Any]:
        names = list(self._do("list").folder(self).names)
        self.machine.random.shuffle(names)
        return iter([self / name for name in names])

    def glob(self, pattern: str) -> Iterator[Any]:
        return iter([path for path in self.iterdir() if fnmatchcase(path.name, pattern)])

    def absolute(self) -> Any:
        return self


@door.force.register(SimulatedPath)
def _force(path: SimulatedPath) -> None:
    disk = path._do("force")
    if path.machine.fails():
        raise _error(errno.EIO, path)
    disk.force(path)


@door.remove_tree.register(SimulatedPath)
def _remove_tree(path: SimulatedPath, *, ignore_errors: bool = False) -> None:
    try:
        for each in path.iterdir():
            if each.is_dir():
                _remove_tree(each, ignore_errors=ignore_errors)
            else:
                try:
                    each.unlink()
                except OSError:
                    if not ignore_errors:
                        raise
        path.rmdir()
    except OSError:
        if not ignore_errors:
            raise


@door.free.register(SimulatedPath)
def _free(path: SimulatedPath) -> int:
    path._do("free").find(path)
    return 2**30


@door.writable.register(SimulatedPath)
def _writable(folder: SimulatedPath) -> bool:
    return True


@door.lock.register(Stream)
def _lock(stream: Stream) -> None:
    stream.path._do("lock")
    if stream.file.owner is not None:
        raise _error(errno.EWOULDBLOCK, stream.path)
    stream.file.owner = stream.process


@door.status_of.register(Stream)
def _status_of(stream: Stream) -> Any:
    return SimpleNamespace(st_dev=1, st_ino=stream.file.number)
