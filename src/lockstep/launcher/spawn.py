"""`lockstep.launch`: run a function on N ranks of this host and hand back what each returned.

The parent hosts the store that the ranks find each other through (host_store.py), and holds one pipe a rank.
Ranks that fail say why through their pipe; the first cause is raised in the parent and the others are killed. What travels
through the pipes is copied: a tensor among the arguments is every rank's own, never shared memory.
"""

from __future__ import annotations

import functools
import multiprocessing
import multiprocessing.util
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

from lockstep.errors import LaunchTimeout, UsageError, WorkerFailed
from lockstep.launcher import failures, rank_process
from lockstep.launcher.failures import Failure
from lockstep.launcher.host_store import HostStore
from lockstep.launcher.rank_process import UNGUARDED, Payload, Seat

R = TypeVar("R")
Context = SpawnContext | ForkServerContext

_TICK_SECONDS = 0.1  # a rank killed with children that hold its pipe open is noticed this late
_SETTLE_SECONDS = 1.0  # how long a rank's complaint about a peer waits for that peer's own report
_JOIN_SECONDS = 10.0


def launch(
    fn: Callable[..., R],
    workers: int = 2,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    timeout: timedelta | None = None,
) -> list[R]:
    """Run `fn(*args, **kwargs)` on `workers` new processes of this host, each a rank, and return their results by rank.

    Inside `fn`, `lockstep.init()` and torch's `init_process_group("gloo")` both find the other ranks without an address or a port.
    `fn` and the arguments are pickled to each rank, results back; tensors are copied. A script that calls this needs
    `if __name__ == "__main__":` around the call, because each rank imports the script. A world that `fn` leaves open is closed.
    Ranks die with this process. Starts nothing on other hosts.

    Args:
        fn: a function that can be imported, as pickle needs it.
        workers: how many processes.
        args: its positional arguments, the same for all ranks.
        kwargs: its keyword arguments.
        timeout: for the whole call; None waits without a limit.

    Raises:
        UsageError: workers < 1, or a function or argument that new processes cannot be given.
        WorkerFailed: a rank failed; names the first one and shows its traceback. The others have been killed.
        LaunchTimeout: ranks were still running at `timeout`; they have been killed.
    """
    check_importable(fn)
    return start_ranks(multiprocessing.get_context("spawn"), fn, workers, args, kwargs or {}, timeout=timeout)


def start_ranks(
    context: Context, fn: Callable[..., R], workers: int, args: Sequence[Any], kwargs: Mapping[str, Any], *, timeout: timedelta | None
) -> list[R]:
    """`launch` with a chosen way to start processes."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise SystemExit(UNGUARDED)  # this is a rank that imports the caller's script; its parent says so
    if isinstance(workers, bool) or not isinstance(workers, int) or workers < 1:
        raise UsageError(f"workers={workers!r}: give a whole number of ranks, at least 1")
    store = HostStore()
    ranks = _Ranks(workers, timeout)
    try:
        ranks.start(context, Payload(fn, tuple(args), dict(kwargs)), store.port)
        return ranks.collect()
    finally:
        ranks.kill()
        store.close()


def check_importable(fn: Callable[..., Any]) -> None:
    """Refuse, with a sentence, functions that a new process cannot import: it would fail there with a pickling traceback."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    name = getattr(fn, "__qualname__", type(fn).__qualname__)
    if "<" in name:
        raise UsageError(f"fn={name}: ranks import the function by its name; give one that is defined with `def` at the top of a module")
    if getattr(fn, "__module__", None) == "__main__" and not os.path.exists(getattr(sys.modules["__main__"], "__file__", "")):
        raise UsageError(
            f"fn={name} is defined in a notebook, an interactive session, `python -c` or `python -`, which new processes cannot import; "
            "move it to a file and import it"
        )


class _Ranks:
    """The ranks of one call: started together, heard one by one, gone at its end."""

    def __init__(self, size: int, timeout: timedelta | None) -> None:
        self._size = size
        self._timeout = timeout
        self._deadline = None if timeout is None else time.monotonic() + timeout.total_seconds()
        self._processes: list[BaseProcess] = []
        self._pipes: dict[int, Connection] = {}  # of ranks that have not answered
        self._started: set[int] = set()
        self._answers: dict[int, bytes] = {}
        self._failures: dict[int, Failure] = {}

    def start(self, context: Context, payload: Payload, port: int) -> None:
        first = Seat(
            rank=0,
            size=self._size,
            port=port,
            parent=os.getpid(),
            by_server=isinstance(context, ForkServerContext),
            environment=dict(os.environ),
            start_method=multiprocessing.get_start_method(allow_none=True),
        )
        multiprocessing.util.get_temp_dir()  # this process's, for the sockets of its ranks' loader workers: who is killed removes none
        for rank in range(self._size):
            seat = replace(first, rank=rank)
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=rank_process.main, args=(seat, payload, theirs), name=f"rank {rank}")
            try:
                process.start()
            except (pickle.PicklingError, AttributeError, TypeError) as error:
                ours.close()
                raise UsageError(f"the function or its arguments cannot be sent to other processes: {error}") from error
            finally:
                theirs.close()
            self._processes.append(process)
            self._pipes[rank] = ours

    def collect(self) -> list[Any]:
        """The results of all ranks, by rank."""
        while self._pipes:
            self._hear(_TICK_SECONDS)
            if self._failures:
                self._settle()
                raise self._explained()
            if self._deadline is not None and time.monotonic() > self._deadline:
                raise self._late(self._pipes)
        self._join()
        return [pickle.loads(self._answers[rank]) for rank in range(self._size)]

    def _join(self) -> None:
        """All have answered. A rank may have threads that it waits for, as Python does; it says so itself (ending.py)."""
        for process in self._processes:
            process.join(None if self._deadline is None else max(0.0, self._deadline - time.monotonic()))
        if living := [rank for rank, process in enumerate(self._processes) if process.exitcode is None]:
            raise self._late(living)

    def kill(self) -> None:
        """End every rank that is still there, with the processes of its session, and wait until it is gone."""
        for process in self._processes:
            if process.exitcode is None and process.pid is not None:
                with suppress(ProcessLookupError):
                    if os.getpgid(process.pid) == process.pid:
                        os.killpg(process.pid, signal.SIGKILL)
                    else:
                        os.kill(process.pid, signal.SIGKILL)
        for process in self._processes:
            process.join(_JOIN_SECONDS)
            if process.exitcode is not None:
                process.close()
        for pipe in self._pipes.values():
            pipe.close()

    def _hear(self, seconds: float) -> None:
        """Take in what ranks have sent, and who has died, waiting up to `seconds` for something."""
        wait([*self._pipes.values(), *(self._processes[rank].sentinel for rank in self._pipes)], seconds)
        for rank, pipe in list(self._pipes.items()):
            code = self._processes[rank].exitcode  # asked before the pipe: what a dead rank sent is in the pipe by now
            try:
                while rank in self._pipes and pipe.poll():
                    self._take(rank, *pipe.recv())
            except (EOFError, OSError):
                code = self._exit_code(rank)
            if rank in self._pipes and code is not None:
                self._died(rank, code)

    def _exit_code(self, rank: int) -> int | None:
        self._processes[rank].join(_JOIN_SECONDS)
        return self._processes[rank].exitcode

    def _take(self, rank: int, kind: str, content: Any) -> None:
        if kind == "started":
            self._started.add(rank)
            return
        if kind == "result":
            self._answers[rank] = content
        else:
            self._failures[rank] = content
        self._pipes.pop(rank).close()

    def _died(self, rank: int, code: int) -> None:
        """A rank ended without a word."""
        if code == UNGUARDED and rank not in self._started:
            raise UsageError(
                "each rank imports the script that launches it, and this one launches again as it is imported; "
                'put the call under `if __name__ == "__main__":`'
            )
        self._failures[rank] = failures.of_exit(code, rank, self._processes[rank].pid or 0, message="before it returned a result")
        self._pipes.pop(rank).close()

    def _settle(self) -> None:
        """While all that is known are complaints about a peer, give that peer a moment to say what happened."""
        until = time.monotonic() + _SETTLE_SECONDS
        while self._pipes and all(failure.standing != "cause" for failure in self._failures.values()) and time.monotonic() < until:
            self._hear(_TICK_SECONDS)

    def _explained(self) -> WorkerFailed:
        cause = failures.first(self._failures.values())
        assert cause is not None
        text = failures.summary(cause)
        if note := failures.finished_early(self._failures.values(), self._answers):
            text += f"\n{note}"
        if cause.traceback:
            text += f"\n\n{cause.traceback.rstrip()}"
        return WorkerFailed(text, cause.rank, cause.traceback)

    def _late(self, ranks: Iterable[int]) -> LaunchTimeout:
        assert self._timeout is not None
        late = sorted(ranks)
        verb = "was" if len(late) == 1 else "were"
        return LaunchTimeout(
            f"{failures.named(late)} of {self._size} {verb} still running after timeout={self._timeout.total_seconds():g} s and had to be killed",
            late,
        )
