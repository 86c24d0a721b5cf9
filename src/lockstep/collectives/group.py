"""`Group`: some ranks, their torch process group, and the collectives among them.

The collectives of this library go through a Group. It numbers them: all members start the same ones
in the same order, so equal numbers are the same operation. Before a collective starts, it writes on
the host's page what it is, so that different ones are never mixed. It counts the bytes that this
rank sends. With one rank every collective is the identity: the same code runs, without
communication.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import ClassVar, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.collectives.background import Background
from lockstep.collectives.fingerprints import (
    BLOCK,
    HostFingerprints,
    Uncompared,
    call_site,
    described,
    listed,
    timed_out,
)
from lockstep.collectives.reduce_op import REDUCE_OPS, Op, reduced_dtype
from lockstep.collectives.shared_memory.operations import HostMemory, possible, share_memory
from lockstep.collectives.shared_memory.segment import share, this_host
from lockstep.collectives.work import Done, Work, wait_on_page
from lockstep.errors import UsageError
from lockstep.runtime import status
from lockstep.runtime.environment import COLLECTIVES_FILE
from lockstep.schedules.algorithms import check_root

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Hosts:
    """A group's ranks by host, so that data can cross between two hosts once, not once for every
    rank.
    """

    local: Group
    """The ranks of this host, which share memory."""
    across: Group
    """The ranks with this one's number on every host, one of each. This rank alone if it does not
    talk to other hosts.
    """
    owners: int
    """The number of ranks of each host that talk to other hosts, from the first: all of them, or
    one if the hosts have different numbers of ranks.
    """


# collectives that nobody has waited for; if there are more, the oldest is logged without a time
_OPEN = 256


class Record:
    """Logs a line for every collective of this rank, if `--debug` asks for it.

        collective #12 all_reduce sum f32[1024] at train.py:71, 1024 elements, ranks 0-3: 0.35 ms

    The time is from the call to the return of the wait for it (on a GPU: until the stream has been
    told to wait).
    """

    def __init__(self, file: str, ranks: Sequence[int]) -> None:
        self._file = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._ranks = listed(ranks)
        self._begun: dict[int, tuple[str, float]] = {}

    @classmethod
    def from_environment(cls, ranks: Sequence[int]) -> Record | None:
        """Return a Record, or None unless the launcher's --debug has named a file."""
        file = os.environ.get(COLLECTIVES_FILE)
        return cls(file, ranks) if file else None

    def begin(self, number: int, text: str, elements: int) -> None:
        """Note that collective `number` was called."""
        line = f"collective #{number} {text}, {elements} elements, {self._ranks}"
        self._begun[number] = line, time.perf_counter()
        while len(self._begun) > _OPEN:
            self._unwaited(min(self._begun))

    def end(self, number: int) -> None:
        """Log collective `number`, whose result is there. A second call does nothing."""
        now = time.perf_counter()
        begun = self._begun.pop(number, None)
        if begun is not None:
            line, since = begun
            self._write(f"{line}: {1e3 * (now - since):.2f} ms")

    def close(self) -> None:
        """Log the collectives that were never waited for, and close the file."""
        for number in sorted(self._begun):
            self._unwaited(number)
        os.close(self._file)

    def _unwaited(self, number: int) -> None:
        begun = self._begun.pop(number, None)
        if begun is not None:
            line, _ = begun
            self._write(f"{line}: not waited for")

    def _write(self, line: str) -> None:
        os.write(self._file, f"{line}\n".encode())


class NativeWork:
    """A c10d collective that has been started, and what remains to do with its result (copy it
    back, divide it).
    """

    def __init__(
        self, group: Group, work: dist.Work, finish: Callable[[], None] | None = None
    ) -> None:
        self._group = group
        self._number = group.number
        self._work: dist.Work | None = work
        self._finish = finish

    def done(self) -> bool:
        """Whether the backend has completed it. Does not wait."""
        return self._work is None or self._work.is_completed()

    def wait(self, timeout: timedelta | None = None) -> None:
        """Return when the result is there (on a GPU: when the current stream will wait for it).
        A second call does nothing.
        """
        work = self._work
        if work is None:
            return
        self._group.wait_for_all(self._number, timeout)
        wait_on_page(work, timeout)
        self._work = None  # not before, so that a wait that raised can be repeated
        if self._finish is not None:
            self._finish()
        self._group.ended(self._number)


class Group:
    """Some ranks of a world, and the collectives among them.

    `World.subgroup` makes one, and so does `Group.of` from a torch process group. Give it to a
    collective as `group`.

    Attributes:
        ranks: the members' ranks in the world.
        rank: this process's number among them.
        number: the number of the last collective that was started.
        bytes_sent: bytes that this rank has sent so far. For the backend's own collectives it is
            a ring's share, whatever algorithm the backend uses.
    """

    _of_process_group: ClassVar[WeakKeyDictionary[dist.ProcessGroup, Group]] = WeakKeyDictionary()

    def __init__(
        self,
        process_group: dist.ProcessGroup,
        *,
        ranks: tuple[int, ...] | None = None,
        rank: int | None = None,
    ) -> None:
        """`ranks` and `rank` are needed only if torch does not know the process group yet."""
        self.process_group = process_group
        self.ranks = tuple(dist.get_process_group_ranks(process_group)) if ranks is None else ranks
        self.rank = dist.get_rank(process_group) if rank is None else rank
        self.size = len(self.ranks)
        self.number = 0
        self.bytes_sent = 0
        self.opened = False
        """Whether its members have found out if they share a host. A World does that, else the
        first collective.
        """
        self._turn = 0  # how many times its process group has been opened; 0: not yet
        self.within: dist.ProcessGroup | None = None
        """torch's default process group, of which this group is a part and with which it ends. None
        if that is not checked.
        """
        self.watched = False
        """Whether this is the group of all ranks, whose collectives are shown on each rank's status
        page.
        """
        self.fingerprints = Uncompared()
        """Compares its collectives with the other ranks' before anything is sent."""
        self.record = Record.from_environment(self.ranks)
        """Logs its collectives; None unless `--debug` asks for it."""
        self._background = Background("lockstep collectives")
        self.memory: HostMemory | None = None
        """The shared memory of the host, if all ranks share it: all-reduce goes through it."""
        self.find_hosts: Callable[[], Hosts | None] = lambda: None
        """Returns the ranks by host if there are several hosts, one of them has several ranks, and
        all compute on CPUs; else None. A collective.
        """
        self.ranks_per_node = self.size
        """The number of consecutive ranks that share a host. The last host may have fewer."""
        self.waits = True
        """Whether this process waits for all ranks before a collective's result. With a GPU it does
        not: it queues the work and runs ahead.
        """
        self.timeout = timedelta(minutes=30)
        self.host: Group = self
        """The group of the same ranks for CPU tensors. Ranks exchange through it what they need
        without waiting for a GPU.
        """

    @classmethod
    def of(cls, process_group: dist.ProcessGroup) -> Group:
        """The Group of a torch process group: always the same object.

        Args:
            process_group: this process must be a member.
        """
        group = cls._of_process_group.get(process_group)
        if group is None:
            in_torch = dist.distributed_c10d._world.pg_map
            for destroyed in set(cls._of_process_group) - set(in_torch):
                cls._of_process_group[destroyed].forget()
            group = cls._of_process_group[process_group] = cls(process_group)
        return group

    def open(self) -> Group:
        """Find out whether the members share a host, if the group is over gloo and no World has
        done so. The first collective calls this, on every member. Return this group.
        """
        if not self.opened:
            self.within = dist.group.WORLD
            # torch must not find the process group alive after the interpreter has ended
            atexit.register(self.forget)
            backend = dist.get_backend(self.process_group)
            plain = backend == "undefined" and not torch.cuda.is_available()
            if self.size > 1 and (plain or backend in ("gloo", "lockstep")):
                store = dist.distributed_c10d._get_process_group_store(self.process_group)
                self.timeout = _timeout_of(self.process_group)
                # a new turn for each new Group of this process group; the same one if this is
                # repeated after a timeout
                self._turn = self._turn or store.add(f"lockstep/{self.rank}", 1)
                self.share_host(dist.PrefixStore(f"lockstep/{self._turn}", store), self.timeout)
            self.opened = True
        return self

    def share_host(
        self,
        store: dist.Store,
        timeout: timedelta,
        *,
        node: int = 0,
        places: bool = True,
        tensors: bool = True,
    ) -> None:
        """If all members are on one host, compare collectives on a page of its memory, and send
        `tensors` (on the CPU) through it. Every member calls it, with a store that nothing else
        uses.

        Ranks that the launcher places on different nodes count as ranks on different hosts.
        `places` is as in HostFingerprints.
        """
        here = f"{node} {this_host()}" if sys.platform == "linux" else ""
        store.set(f"host/{self.rank}", here)
        keys = [f"host/{rank}" for rank in range(self.size)]
        hosts = {host.decode() for host in self._gathered(store, keys, timeout)}
        if hosts != {here} or not here:
            return
        (page,) = share(store, "page", self.rank, self.size, self.size * BLOCK, timeout)
        self.fingerprints = HostFingerprints(page, self.rank, self.ranks, places=places)
        if tensors and possible():
            self.memory = share_memory(store, "memory", self, timeout)

    def _gathered(
        self, store: dist.Store, keys: Sequence[str], timeout: timedelta
    ) -> Sequence[bytes]:
        """Return what every rank has written under its key. Raises CollectiveTimeout."""
        status.waits(True)
        try:
            store.wait(list(keys), timeout)
        except RuntimeError as error:  # a FileStore raises no DistError
            keyed = zip(self.ranks, keys, strict=True)
            missing = [rank for rank, key in keyed if not store.check([key])]
            if not missing:
                raise
            call = f"the first collective of a process group {call_site()}"
            raise timed_out(self.number + 1, call, missing, timeout) from error
        finally:
            status.waits(False)
        # torch's stubs lack it
        if store.has_extended_api():  # type: ignore[attr-defined]
            return list(map(bytes, store.multi_get(list(keys))))
        return [store.get(key) for key in keys]

    def in_background(self, run: Callable[[], T]) -> Future[T]:
        """Call `run` on this group's own thread, after what was submitted before."""
        return self._background.submit(run)

    def forget(self) -> None:
        """Release everything, at the end of the world. The next Group of this process group is a
        new one.
        """
        atexit.unregister(self.forget)
        self._background.close()
        if self.record is not None:
            self.record.close()
            self.record = None
        self.fingerprints.close()
        self.fingerprints = Uncompared()
        if self.memory is not None:
            self.memory.close()
            self.memory = None
        self.find_hosts = lambda: None
        self._of_process_group.pop(self.process_group, None)

    def alone(self) -> Group:
        """Return a group of this rank alone: its collectives are the identity, and involve no other
        rank.
        """
        return Group(self.process_group, ranks=(self.ranks[self.rank],), rank=0)

    @classmethod
    def default(cls) -> Group:
        """Return the Group of torch's default process group, whoever has opened it. Its collectives
        are shown on the status page.
        """
        if not dist.is_initialized():
            if len(cls._of_process_group):
                raise UsageError("process-group-destroyed", what="a collective")
            raise UsageError("no-world-open", why="")
        world = dist.group.WORLD
        assert world is not None
        group = cls.of(world)
        group.watched = True
        return group

    def __repr__(self) -> str:
        return f"Group(rank {self.rank} of {self.size}, world ranks {list(self.ranks)})"

    def all_reduce(self, tensor: Tensor, op: Op = "sum", place: str | None = None) -> Work:
        """Replace `tensor` on every rank by the sum (mean, max, min, product) over all ranks:
        through shared memory if the ranks have it, else by the backend.

        The tensor may have any dtype that the backend reduces and any strides; it may be empty or
        0-d. A mean divides the sum once; a mean of integers raises UsageError. `place` is where
        this was called, for errors; by default the caller's file and line.
        """
        if self.memory is not None:
            return self.memory.all_reduce(tensor, op, place)
        return self.backend_all_reduce(tensor, op, place)

    def backend_all_reduce(self, tensor: Tensor, op: Op = "sum", place: str | None = None) -> Work:
        """all_reduce by the backend, even if the ranks share memory."""
        working = reduced_dtype(op, tensor.dtype, tensor.layout)
        sends = 2 * (self.size - 1) * tensor.nbytes // self.size
        self.announce("all_reduce", tensor, op, place, sends)
        if self.size == 1 or tensor.numel() == 0:
            return Done()
        flat = tensor.detach().to(working).contiguous()
        work = dist.all_reduce(flat, op=REDUCE_OPS[op], group=self.process_group, async_op=True)

        def finish() -> None:
            if op == "mean":
                flat.div_(self.size)
            if flat.data_ptr() != tensor.data_ptr():
                with torch.no_grad():
                    tensor.copy_(flat)

        return NativeWork(self, work, finish)

    def broadcast(
        self, tensor: Tensor, root: int = 0, place: str | None = None, text: str | None = None
    ) -> Work:
        """Replace `tensor` on every rank by that of rank `root` (its number in this group): through
        shared memory if the ranks have it.
        """
        if self.memory is not None:
            return self.memory.broadcast(tensor, root, place, text)
        return self.backend_broadcast(tensor, root, place, text)

    def backend_broadcast(
        self, tensor: Tensor, root: int = 0, place: str | None = None, text: str | None = None
    ) -> Work:
        """broadcast by the backend, even if the ranks share memory."""
        self.check_root(root)
        sends = tensor.nbytes if self.rank == root and self.size > 1 else 0
        self.announce("broadcast", tensor, f"from {root}", place, sends, text)
        if self.size == 1 or tensor.numel() == 0:
            return Done()
        # as bytes: a backend need not support the dtype of what it moves
        octets = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        work = dist.broadcast(octets, src=self.ranks[root], group=self.process_group, async_op=True)

        def copy_back() -> None:
            if octets.data_ptr() != tensor.data_ptr():
                with torch.no_grad():
                    tensor.copy_(octets.view(tensor.dtype).view(tensor.shape))

        return NativeWork(self, work, copy_back)

    def all_gather(
        self, tensor: Tensor, place: str | None = None, text: str | None = None
    ) -> Tensor:
        """Return every rank's tensor, joined along dim 0 in the order of ranks: shape [n, ...]
        gives [size * n, ...], 0-d gives [size].

        The shapes must be equal on all ranks. It goes through shared memory if the ranks have it.
        """
        if self.memory is not None:
            pieces = tensor.new_empty((self.size, *tensor.shape))
            self.memory.all_gather(pieces.unbind(), tensor, place, text).wait()
            return pieces.flatten(0, 1) if tensor.dim() else pieces
        self.announce("all_gather", tensor, "", place, (self.size - 1) * tensor.nbytes, text)
        self.wait_for_all(self.number)
        piece = tensor.detach().contiguous()
        if tensor.dim() == 0:
            piece = piece.reshape(1)
        if self.size == 1 or tensor.numel() == 0:
            return piece.repeat(self.size, *[1] * (piece.dim() - 1))
        joined = piece.new_empty((self.size * piece.shape[0], *piece.shape[1:]))
        octets = joined.view(-1).view(torch.uint8).chunk(self.size)
        dist.all_gather(list(octets), piece.view(-1).view(torch.uint8), group=self.process_group)
        self.ended(self.number)
        return joined

    def exchange(
        self,
        arriving: Tensor,
        from_each: Sequence[int],
        leaving: Tensor,
        to_each: Sequence[int],
        place: str | None = None,
    ) -> Work:
        """Start an all-to-all: send `to_each[r]` elements of `leaving` to rank r, in the order of
        ranks, and receive `from_each[r]` elements from it into `arriving`.

        Both are flat and contiguous.
        """
        width = leaving.element_size()
        sends = width * (sum(to_each) - to_each[self.rank])
        text = f"all_to_all of slices, {str(leaving.dtype).removeprefix('torch.')}"
        self.announce("all_to_all", leaving, "", place, sends, text)
        work = dist.all_to_all_single(
            arriving.view(torch.uint8),
            leaving.view(torch.uint8),
            [width * count for count in from_each],
            [width * count for count in to_each],
            group=self.process_group,
            async_op=True,
        )
        assert work is not None
        return NativeWork(self, work)

    def send(self, tensor: Tensor, to: int) -> None:
        """Send a contiguous tensor to rank `to` of this group and wait until it has left."""
        self.bytes_sent += tensor.nbytes
        status.waits(True)
        dist.send(tensor, dst=self.ranks[to], group=self.process_group)
        status.waits(False)

    def receive(self, tensor: Tensor, source: int) -> None:
        """Receive a contiguous tensor from rank `source` of this group."""
        status.waits(True)
        dist.recv(tensor, src=self.ranks[source], group=self.process_group)
        status.waits(False)

    def announce(
        self,
        kind: str,
        tensor: Tensor,
        detail: str,
        place: str | None,
        sends: int,
        text: str | None = None,
    ) -> int:
        """Give the next collective its number, and return it. If ranks compare, tell them what it
        is. Raises CollectiveMismatch.

        `text` describes it in place of `kind`, `tensor` and `detail`.
        """
        self.bytes_sent += sends
        if self.watched or self.fingerprints.compares or self.record is not None:
            site = place or call_site()
            text = (
                f"{text} {site}"
                if text is not None
                else described(kind, tensor.shape, tensor.dtype, detail, site)
            )
        self.say(text or "")
        if self.record is not None:
            self.record.begin(self.number, text or kind, tensor.numel())
            if self.size == 1 or tensor.numel() == 0:
                self.record.end(self.number)
        return self.number

    def ended(self, number: int) -> None:
        """Note that the result of collective `number` is there."""
        if self.record is not None:
            self.record.end(number)

    def say(self, text: str) -> None:
        """Take the next number for something that all ranks do together, which `text` describes.
        Raises CollectiveMismatch.
        """
        self.number += 1
        if self.within is not None and dist.group.WORLD is not self.within:
            call = f"collective #{self.number}"
            if text:
                call += f", {text},"
            raise UsageError("process-group-destroyed", what=call)
        if self.watched:
            status.collective(self.number, text)
        self.fingerprints.post(self.number, text)

    def look(self, awaited: Sequence[int] = ()) -> None:
        """Raise an error about the other ranks that the page shows, if any. For use while this rank
        waits for others outside a collective of the backend.

        `awaited` are numbers in this group of ranks that have begun the collective, and that this
        rank waits for within it.
        """
        self.fingerprints.look(self.number, awaited)

    def wait_for_all(self, number: int, timeout: timedelta | None = None) -> None:
        """Wait until all ranks have come to collective `number`. Errors name the ranks that have
        died or do not come.
        """
        if self.waits:
            self.fingerprints.wait(number, timeout or self.timeout)

    def check_root(self, root: int) -> None:
        check_root(root, self.size)


def _timeout_of(process_group: dist.ProcessGroup) -> timedelta:
    """Return the timeout that the user gave the process group, if torch knows it; else torch's
    default.
    """
    with suppress(RuntimeError, AttributeError):
        return timedelta() + process_group._get_backend(torch.device("cpu")).options._timeout
    return dist.default_pg_timeout
