"""The ranks of this host, alone or among others, from one start to their end: start, watch and end
them.

A rank that has ended is not reaped at once, so that its whole process group can be ended safely.
After a failure the other ranks get a short time to show the true cause, before they are stopped.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

from lockstep.errors import ExitCode, LockstepError
from lockstep.launcher import fork_server
from lockstep.launcher.failures import first
from lockstep.launcher.fork_server import Variables
from lockstep.launcher.rank import Rank
from lockstep.launcher.start import ForkServer
from lockstep.launcher.stop import print_line
from lockstep.runtime import private, processes
from lockstep.runtime.failure_record import DIRECTORY, Failure
from lockstep.runtime.launched import LOOPBACK
from lockstep.runtime.processes import Pids

_LOOK_SECONDS = 0.05
# seconds that a rank's complaint about a peer waits for that peer's own record
_SETTLE_SECONDS = 1.0
# further seconds if a peer is seen to be dying, or is leaving because it was asked to
_DYING_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class Ended:
    """The state of this host's ranks at the end, before the launcher stopped any."""

    pids: Pids
    codes: Mapping[int, int | None]
    """The exit code by rank: -n if signal n killed it, None if it was still running."""

    @property
    def living(self) -> dict[int, int]:
        """The pids of the ranks that were still running."""
        return {rank: pid for rank, pid in self.pids.items() if self.codes[rank] is None}


def explained(failures: Iterable[Failure], state: Ended) -> bool:
    """Whether `failures` tell the cause."""
    cause = first(failures)
    if cause is not None and cause.code == ExitCode.PREEMPTED:
        return not state.living  # wait for the other ranks, which are leaving too
    return cause is not None and cause.standing == "cause"


@dataclass(frozen=True, slots=True)
class Farewell:
    """How ranks are ended: by a signal, and by SIGKILL after some seconds or once `hurried`."""

    number: signal.Signals = signal.SIGTERM
    seconds: float = 0.5
    hurried: Callable[[], bool] = lambda: False


class Stopped(Exception):
    """The caller asked to stop. No rank is left running."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalRanks:
    """The ranks of one host among all ranks of the job, and the address of their store."""

    count: int
    """Ranks of this host."""
    first_rank: int = 0
    size: int
    node: int = 0
    nodes: int = 1
    address: str
    port: int

    @property
    def numbers(self) -> range:
        """The numbers of this host's ranks."""
        return range(self.first_rank, self.first_rank + self.count)

    def variables(self, local_rank: int) -> dict[str, str]:
        """Return the variables that scripts and libraries read to find a rank's place."""
        rank = self.first_rank + local_rank
        values = {
            "RANK": rank,
            "WORLD_SIZE": self.size,
            "LOCAL_RANK": local_rank,
            "LOCAL_WORLD_SIZE": self.count,
            "GROUP_RANK": self.node,
            "GROUP_WORLD_SIZE": self.nodes,
            "ROLE_RANK": rank,
            "ROLE_WORLD_SIZE": self.size,
            "ROLE_NAME": "lockstep",
            "MASTER_ADDR": self.address,
            "MASTER_PORT": self.port,
        }
        return {name: str(value) for name, value in values.items()}


class Ranks:
    """Ranks from their start to their end. After the `with` block no rank is left, and no process
    in a rank's process group.
    """

    def __init__(
        self,
        server: ForkServer,
        local_ranks: LocalRanks,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._server = server
        self._local_ranks = local_ranks
        self._clock = clock
        self._pids: dict[int, int] = {}
        self._over = False

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *exception: object) -> None:
        if not self._over:
            self.end(Farewell(seconds=0.0))
        for pid in self._pids.values():
            self._server.release(pid)

    def start(
        self,
        rank: Rank,
        variables: Callable[[int], Variables],
        *,
        descriptors: Callable[[int], Sequence[int]] = lambda number: (),
        streams: Mapping[int, Sequence[int]] | None = None,
        shares: Sequence[Collection[int]] = (),
        cold: bool = False,
    ) -> None:
        """Start all ranks.

        Args:
            rank: the work of each, except for its number.
            variables: returns further environment variables of the rank with this number.
            descriptors: returns this process's descriptors that the rank's program gets.
            streams: each rank's standard streams. Default: this process's.
            shares: the cores that each rank is bound to, by local rank. Empty: no rank is bound.
            cold: each rank is a fresh interpreter.

        Raises:
            ServerGone: a rank cannot be started; the others are then ended.
        """
        beside = rank.work.beside()
        for local_rank, number in enumerate(self._local_ranks.numbers):
            placement = self._local_ranks.variables(local_rank)
            environment = {**os.environ, **placement, **variables(number), DIRECTORY: rank.records}
            # with it, libraries would take this process for one of torchrun's
            environment.pop("TORCHELASTIC_RUN_ID", None)
            self._pids[number] = self._server.fork(
                replace(rank, rank=number, cores=shares[local_rank] if shares else ()),
                descriptors(number),
                environment,
                streams=(0, 1, 2) if streams is None else streams[number],
                beside=beside,
                cold=cold,
            )

    def state(self) -> Ended:
        """Return the present state of the ranks."""
        codes = self._server.codes(self._pids.values())
        return Ended(self._pids, {rank: codes[pid] for rank, pid in self._pids.items()})

    def run(
        self,
        *,
        failures: Callable[[Ended], Iterable[Failure]],
        stopping: Callable[[Pids], Farewell | None],
        spared: Callable[[Ended], Collection[int]] = lambda now: (),
        called_off: Callable[[], bool] = lambda: False,
        farewell: Farewell = Farewell(),
    ) -> Ended:
        """Wait until all ranks have ended well or one has failed. Return their state at that time.

        If a rank fails, and the known failures do not tell the cause, the others have a second to
        record it. Then each rank's process group is ended, by `farewell`.

        Args:
            failures: returns the failures that are known now.
            stopping: called 20 times a second with the pids of the living ranks, by rank; returns
                how to end them, None to go on.
            spared: returns the failed ranks that the others continue without.
            called_off: called as often; returns whether the ranks of other hosts are being
                stopped, and these with them.

        Raises:
            Stopped: `stopping` returned a farewell.
        """
        settled_at: float | None = None
        look_at = self._clock()
        while True:
            state = self.state()
            living = state.living
            # every rank that ends ends the wait below, too
            if living and self._clock() >= look_at:
                look_at = self._clock() + _LOOK_SECONDS
                stop = stopping(living)
                if stop is not None:
                    self.end(stop)
                    raise Stopped
            failed = {rank for rank, code in state.codes.items() if code}
            if called_off():
                break
            if failed and failed.difference(spared(state)):
                settled_at = settled_at or self._clock()
                late = self._clock() - settled_at > self._patience(state)
                if late or not living or explained(failures(state), state):
                    break
            elif not living:
                self._end_left_over()
                return state
            self._server.wait(_LOOK_SECONDS)
        self.end(farewell)
        return state

    def _patience(self, state: Ended) -> float:
        # Peers see that a process was killed when its first thread has ended. The system sees it
        # when the last one has, perhaps a thread of low priority.
        states = [self._server.state(pid) for pid in state.living.values()]
        dying = processes.DEAD in states
        # a rank leaves after its save; the others follow a moment later
        leaving = ExitCode.PREEMPTED in state.codes.values()
        return _SETTLE_SECONDS + (_DYING_SECONDS if dying or leaving else 0)

    def end(self, farewell: Farewell) -> None:
        """End every rank's process group. A rank that has died is not reaped yet, so its pid still
        means its group.
        """
        self._over = True
        if farewell.seconds:
            self._signal(farewell.number)
        deadline = self._clock() + farewell.seconds
        with suppress(LockstepError):  # the server has gone, and the ranks with it
            while self._clock() < deadline and self.state().living and not farewell.hurried():
                self._server.wait(0.01)
        # list them now: dead processes cannot be listed
        members = set[int]().union(*self._groups().values())
        self._signal(signal.SIGKILL)
        with suppress(LockstepError):
            while self.state().living:
                self._server.wait(_LOOK_SECONDS)
        deadline = self._clock() + _SETTLE_SECONDS
        while members and self._groups() and self._clock() < deadline:
            # killed, and about to end
            time.sleep(0.01)
        private.remove_torch_names(members)

    def _end_left_over(self) -> None:
        """End what the ranks have left in their process groups, after all have ended well. A
        process with its own session is not ended.
        """
        self._over = True
        deadline = self._clock() + _SETTLE_SECONDS
        # until the deadline multiprocessing's helpers end by themselves
        while self._groups() and self._clock() <= deadline:
            time.sleep(0.01)
        left_over = self._groups()
        for rank, members in left_over.items():
            listed = ", ".join(f"{name} (pid {pid})" for pid, name in members.items())
            print_line(
                f"rank {rank} has left {listed} running: Lockstep ended it. To keep a process after"
                " the run, start it with start_new_session=True"
            )
        if left_over:
            self.end(Farewell())

    def _groups(self) -> dict[int, dict[int, str]]:
        """Return the living processes of every rank's process group: their names by pid."""
        members = self._server.groups(self._pids.values())
        return {rank: members[pid] for rank, pid in self._pids.items() if pid in members}

    def _signal(self, number: signal.Signals) -> None:
        for pid in self._pids.values():
            self._server.send_signal(pid, number)


@contextmanager
def store(server: ForkServer, address: str = LOOPBACK, port: int = 0) -> Iterator[tuple[str, int]]:
    """Hold a TCPStore for ranks in a separate process until the block's end. Yields its address and
    port.

    The port is open at once: ranks that connect before the process is ready wait for it.

    Raises:
        LockstepError: this process cannot listen at the address.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        listener = socket.create_server((address, port), family=family)
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        raise LockstepError("store-not-started", address=f"{address}:{port}", why=reason) from None
    with listener:
        port = listener.getsockname()[1]
        pid = server.fork(_StoreProcess(address, port), [listener.fileno()])
    try:
        yield address, port
    finally:
        server.send_signal(pid, signal.SIGKILL)
        server.release(pid)


@contextmanager
def alone(server: ForkServer, count: int) -> Iterator[LocalRanks]:
    """Yield a job of `count` ranks on this host alone, with their store until the block's end."""
    with store(server) as (address, port):
        yield LocalRanks(count=count, size=count, address=address, port=port)


@dataclass(frozen=True, slots=True)
class _StoreProcess:
    """The work of a process that holds a store for as long as its launcher lives. It gets the
    listening socket.
    """

    address: str
    port: int

    def __call__(self, listener: int) -> None:
        for number in fork_server.FOR_LAUNCHER:
            signal.signal(number, signal.SIG_IGN)
        import torch.distributed as dist

        _store = dist.TCPStore(  # it ends with this name
            self.address,
            self.port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener,
        )
        while True:
            signal.pause()
