"""One generation of ranks on this host, alone or among others: start them, look at them, end them.

A rank's process is looked at without being reaped, so that a whole process group can be ended
safely, and a short moment is left for the true cause to show before the others are stopped.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from lockstep.errors import ExitCode, LockstepError
from lockstep.launcher import fork_server, processes
from lockstep.launcher.failures import Failure, first
from lockstep.launcher.seat import Seat
from lockstep.launcher.server import Server
from lockstep.runtime import private

_LOOK_SECONDS = 0.05
_SETTLE_SECONDS = 1.0  # how long a rank's complaint about a peer waits for that peer's own record
# how much longer it waits for a peer that is seen to be dying, or is leaving as it was asked to
_DYING_SECONDS = 20.0
_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Ended:
    """How this host's ranks stood when the generation was over: before anyone was stopped by us."""

    pids: Mapping[int, int]
    codes: Mapping[int, int | None]
    """By rank: exit code, minus the signal that killed it, or None if it was still running."""


def explained(failures: Iterable[Failure], now: Ended) -> bool:
    """Whether they tell the cause."""
    cause = first(failures)
    if cause is not None and cause.code == ExitCode.PREEMPTED:
        return None not in now.codes.values()  # the others are leaving too
    return cause is not None and cause.standing == "cause"


class Stopped(Exception):
    """The caller asked to stop. Nothing is left running."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalRanks:
    """The ranks of one host among all of the job, and where they find the store."""

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
        """Of this host's ranks."""
        return range(self.first_rank, self.first_rank + self.count)

    def variables(self, local_rank: int) -> dict[str, str]:
        """What torch's own launcher tells a rank; libraries look for these names."""
        rank, size, local_size = str(self.first_rank + local_rank), str(self.size), str(self.count)
        return {
            "RANK": rank,
            "WORLD_SIZE": size,
            "LOCAL_RANK": str(local_rank),
            "LOCAL_WORLD_SIZE": local_size,
            "GROUP_RANK": str(self.node),
            "GROUP_WORLD_SIZE": str(self.nodes),
            "ROLE_RANK": rank,
            "ROLE_WORLD_SIZE": size,
            "ROLE_NAME": "lockstep",
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(self.port),
            "TORCHELASTIC_RUN_ID": "lockstep",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }


class Ranks:
    """Ranks from their start to their end. At the end of the `with` block none is left, nor what
    they have started in their process groups.
    """

    def __init__(
        self, server: Server, place: LocalRanks, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._server, self._place, self._clock = server, place, clock
        self._pids: dict[int, int] = {}
        self._over = False

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *exception: object) -> None:
        if not self._over:
            self.end(0.0)
        for pid in self._pids.values():
            self._server.release(pid)

    def start(
        self,
        seat: Callable[[int, Mapping[str, str]], Seat],
        beside: Sequence[str] = (),
        descriptors: Callable[[int], Sequence[int]] = lambda rank: (),
        *,
        cold: bool = False,
    ) -> None:
        """Start them all: a `seat(rank, variables)` each, with `descriptors(rank)` beside the
        streams.

        Raises:
            ServerGone: one of them cannot be started; the others are then ended.
        """
        for local in range(self._place.count):
            rank = self._place.first_rank + local
            variables = self._place.variables(local)
            self._pids[rank] = self._server.fork(
                seat(rank, variables), (0, 1, 2, *descriptors(rank)), cold=cold, beside=beside
            )

    def look(self) -> Ended:
        """How they stand now."""
        return Ended(self._pids, {rank: self._server.code(pid) for rank, pid in self._pids.items()})

    def run(
        self,
        *,
        failures: Callable[[Ended], Iterable[Failure]],
        stopping: Callable[[Mapping[int, int]], bool],
        spared: Callable[[Ended], Collection[int]] = lambda now: (),
        called_off: Callable[[], bool] = lambda: False,
        grace: float = 0.5,
    ) -> Ended:
        """Wait until all have ended well or the first has not; how they stood then.

        When a rank fails, and what is known does not tell the cause, the others have a second to
        leave it. Then they are stopped: SIGTERM, `grace` seconds, SIGKILL to each rank's process
        group.

        Args:
            failures: what is known now.
            stopping: asked 20 times a second, of the pids of those that live by rank, whether to
                stop.
            spared: which of the ranks that have failed are done without: the others go on.
            called_off: asked as often, whether the ranks of other hosts are being stopped, and
                these with them.

        Raises:
            Stopped: `stopping` was true.
        """
        settled_at: float | None = None
        while True:
            now = self.look()
            living = {rank: pid for rank, pid in now.pids.items() if now.codes[rank] is None}
            if living and stopping(living):
                self.end(grace)
                raise Stopped
            failing = {rank for rank, code in now.codes.items() if code}
            failed = bool(failing and failing.difference(spared(now)))
            if called_off():
                break
            if failed:
                settled_at = settled_at or self._clock()
                if (
                    explained(failures(now), now)
                    or not living
                    or self._clock() - settled_at > self._patience(now)
                ):
                    break
            elif not living:
                self._end_left_over()
                return now
            self._server.wait(_LOOK_SECONDS)
        self.end(grace)
        return now

    def _patience(self, now: Ended) -> float:
        # One that was killed is gone for its peers as soon as its first thread is, and for the
        # system when its last, perhaps a nice one, is.
        dying = any(
            code is None and self._server.state(now.pids[rank]) == processes.DEAD
            for rank, code in now.codes.items()
        )
        # after a save, the others a moment later
        leaving = ExitCode.PREEMPTED in now.codes.values()
        return _SETTLE_SECONDS + (_DYING_SECONDS if dying or leaving else 0)

    def end(self, grace: float) -> None:
        """End every rank's process group. A rank that has died is not reaped yet, so its number
        still means its group.
        """
        self._over = True
        self._server.resume()
        if grace:
            self._signal(signal.SIGTERM)
        deadline = self._clock() + grace
        with suppress(LockstepError):  # the server has gone, and they with it
            while self._clock() < deadline and None in self.look().codes.values():
                self._server.wait(0.01)
        # once they are dead nobody can list them
        members = {pid for found in self._groups().values() for pid in found}
        self._signal(signal.SIGKILL)
        with suppress(LockstepError):
            while None in self.look().codes.values():
                self._server.wait(_LOOK_SECONDS)
        deadline = self._clock() + _SETTLE_SECONDS
        while members and self._groups() and self._clock() < deadline:
            # killed, and about to end
            time.sleep(0.01)
        private.remove_torch_names(members)

    def _end_left_over(self) -> None:
        """All ranks have ended well. What they have started in their process groups ends with
        them; not what has a session of its own.
        """
        self._over = True
        deadline = self._clock() + _SETTLE_SECONDS
        while left := self._groups():
            if self._clock() > deadline:  # helpers of multiprocessing go by themselves
                for rank, found in left.items():
                    _say_left(rank, found)
                self.end(0.5)
                return
            time.sleep(0.01)

    def _groups(self) -> dict[int, dict[int, str]]:
        """The living processes of every rank's process group: their names by pid."""
        found = self._server.groups(self._pids.values())
        return {rank: found[pid] for rank, pid in self._pids.items() if pid in found}

    def _signal(self, number: signal.Signals) -> None:
        for pid in self._pids.values():
            self._server.send_signal(pid, number)


def _say_left(rank: int, found: Mapping[int, str]) -> None:
    listed = ", ".join(f"{name} (pid {pid})" for pid, name in found.items())
    print(
        f"rank {rank} has left {listed} running: Lockstep ended it. To keep a process after the"
        " run, start it with start_new_session=True",
        file=sys.stderr,
        flush=True,
    )


@contextmanager
def store(server: Server, address: str | None = None, port: int = 0) -> Iterator[tuple[str, int]]:
    """A store for ranks in a process of its own, until the block's end: its address and port.
    `address`: for those of other hosts too.
    """
    pid, stream = server.ask(_StoreProcess(address, port))
    try:
        with stream:
            said = stream.readline()
        if not said:
            raise LockstepError("store-not-started")
        yield address or _LOOPBACK, int(said)
    finally:
        server.send_signal(pid, signal.SIGKILL)
        server.release(pid)


@contextmanager
def alone(server: Server, count: int) -> Iterator[LocalRanks]:
    """So many ranks of this host and no others, with their store until the block's end."""
    with store(server) as (address, port):
        yield LocalRanks(count=count, size=count, address=address, port=port)


@dataclass(frozen=True, slots=True)
class _StoreProcess:
    """The work of a process that holds a store for as long as its launcher lives."""

    address: str | None
    port: int

    def __call__(self, descriptor: int) -> None:
        for number in fork_server.FOR_LAUNCHER:
            signal.signal(number, signal.SIG_IGN)
        from lockstep.runtime.host_store import HostStore, OpenStore

        store = HostStore() if self.address is None else OpenStore(self.address, self.port)
        os.write(descriptor, f"{store.port}\n".encode())
        os.close(descriptor)
        while True:
            signal.pause()
