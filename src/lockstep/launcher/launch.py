"""`lockstep.launch`: run a function on N ranks of this host and return each rank's result.

The function, its arguments and the results are copied through files without a name. A tensor among
the arguments is each rank's own, never shared memory. The error of the first rank that fails is
raised in the caller, and the other ranks are ended.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import pickle
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar, get_args

from lockstep.config.knob import chosen, whole
from lockstep.config.launching import Bind, Launch
from lockstep.errors import LaunchTimeout, UsageError
from lockstep.launcher import failures
from lockstep.launcher.call import FunctionCall, anonymous_file, is_complete, read_complete
from lockstep.launcher.console import forwarded
from lockstep.launcher.engine import Ended, Farewell, LocalRanks, Ranks, Stopped, alone
from lockstep.launcher.fork_server import Variables
from lockstep.launcher.notebook import Cell, in_kernel
from lockstep.launcher.rank import Rank
from lockstep.launcher.start import FOR_SCRIPTS, fork_server
from lockstep.launcher.stop import Stop
from lockstep.launcher.supervise import Watch
from lockstep.runtime import binding
from lockstep.runtime.failure_record import Failure
from lockstep.runtime.private import run_directory
from lockstep.runtime.processes import Pids

_AT_ONCE = Farewell(seconds=0.0)

R = TypeVar("R")


def launch(
    fn: Callable[..., R],
    workers: int = 2,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    timeout: timedelta | None = None,
    bind: Bind = "auto",
) -> list[R]:
    """Run `fn(*args, **kwargs)` on `workers` new processes of this host, and return their results.

    Each process is a rank. Inside `fn`, `lockstep.init()` and torch's `init_process_group("gloo")`
    find the other ranks without an address or a port. A world that `fn` leaves open is closed.

    `fn`, its arguments and its results are pickled; tensors are copied. A script that calls this
    needs `if __name__ == "__main__":` around the call, because each rank imports the script. In a
    notebook `fn` may be defined in a cell; what ranks print appears there, with the rank. Ranks end
    when this process dies or is interrupted.

    The first call imports torch in a process that stays. Later calls fork it, in a fraction of a
    second.

    Example::

        results = lockstep.launch(train, workers=4, args=(model, dataset))

    Args:
        fn: a function that can be imported, as pickle needs it; in a notebook or an interactive
            session any function.
        workers: the number of processes.
        args: its positional arguments, the same for all ranks.
        kwargs: its keyword arguments.
        timeout: for the whole call. None: no limit.
        bind: "auto" binds each rank to physical cores of its own on hosts with several NUMA nodes,
            or with more cores than ranks. "none" binds no rank.

    Returns:
        What `fn` returned, by rank.

    Raises:
        UsageError: workers < 1, or a function or argument that cannot be given to a new process.
        WorkerFailed: a rank failed. The error names the first one and shows its traceback. The
            others have been killed.
        LaunchTimeout: ranks were still running at `timeout`. They have been killed.
        ServerGone: the process that forks ranks was killed, or the system lets it start no more
            processes.
    """
    chosen("bind", bind, get_args(Bind))
    __tracebackhide__ = True  # for notebooks and pytest: the message holds the rank's traceback
    try:
        return start_ranks(fn, workers, args, kwargs or {}, timeout=timeout, bind=bind)
    except KeyboardInterrupt:
        raise KeyboardInterrupt("all ranks have been ended") from None


def start_ranks(
    fn: Callable[..., R],
    workers: int,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    timeout: timedelta | None,
    imports: Sequence[str] = (),
    variables: Callable[[int], Variables] | None = None,
    local_ranks: LocalRanks | None = None,
    bind: Bind = "auto",
) -> list[R]:
    """`launch` with further options.

    Args:
        imports: modules to import before ranks are forked.
        variables: returns further environment variables of a rank. With it each rank is a fresh
            interpreter.
        local_ranks: these `workers` ranks among those of several nodes. Only their results are
            returned.
    """
    __tracebackhide__ = True
    _check(workers)
    began = time.monotonic()
    with ExitStack() as at_end:
        server = fork_server((*FOR_SCRIPTS, *imports), cold=variables is not None)
        call = FunctionCall.here()
        question = _open_file(at_end)
        answers = [_open_file(at_end) for _ in range(workers)]
        handed_over = call.write(question, fn, args, kwargs)
        records = at_end.enter_context(run_directory())
        server.ready()
        if local_ranks is None:
            local_ranks = at_end.enter_context(alone(server, workers))
        results = _Results(records, dict(zip(local_ranks.numbers, answers, strict=True)))
        watch = _Deadline(records, timeout, began)
        streams = None
        if in_kernel():
            streams = at_end.enter_context(forwarded(local_ranks.numbers, cell=Cell()))
        ranks = at_end.enter_context(Ranks(server, local_ranks))
        try:
            ranks.start(
                Rank(rank=0, work=call, records=str(records)),
                variables or (lambda number: {}),
                descriptors=lambda number: (question, results.files[number], *handed_over),
                streams=streams,
                shares=binding.shares(workers, bind),
            )
            ended = ranks.run(
                failures=results.failures,
                stopping=watch.must_end,
                spared=lambda now: results.complete,
                farewell=_AT_ONCE,
            )
        except Stopped:
            raise watch.timed_out(workers) from None
        failed = results.failures(ended)
        if failed:
            raise _error_of(failed, results.complete)
        return [pickle.loads(read_complete(file)) for file in answers]


def _check(workers: object) -> None:
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise UsageError("launch-not-guarded")
    whole("workers", workers, unit="ranks")


def _open_file(at_end: ExitStack) -> int:
    file = anonymous_file()
    at_end.callback(os.close, file)
    return file


class _Deadline:
    """Watches the ranks, and ends them when the time is over."""

    def __init__(self, records: Path, timeout: timedelta | None, began: float) -> None:
        self._watch = Watch(records, Stop(speaks=False), Launch(on_stall="wait"))
        self._seconds = math.inf if timeout is None else timeout.total_seconds()
        self._time = began + self._seconds
        self._late: list[int] = []
        self._waiting = ""

    def must_end(self, living: Pids) -> Farewell | None:
        farewell = self._watch.must_end(living)
        if time.monotonic() < self._time:
            return farewell
        self._late = sorted(living)
        self._waiting = self._watch.present(living)
        return _AT_ONCE

    def timed_out(self, size: int) -> LaunchTimeout:
        return LaunchTimeout(
            "launch-timeout",
            who=failures.named(self._late),
            size=size,
            seconds=self._seconds,
            running=self._late,
            waiting=self._waiting or "Give a longer timeout.",
        )


@dataclass(frozen=True, slots=True)
class _Results:
    """What ranks have left: results, and the records of failures."""

    records: Path
    files: Mapping[int, int]
    """The result files, by rank."""

    @property
    def complete(self) -> set[int]:
        """The ranks that have left a result. After that, how their process ends does not matter."""
        return {rank for rank, file in self.files.items() if is_complete(file)}

    def failures(self, now: Ended) -> list[Failure]:
        """Return the failures of ranks that have ended without a result."""
        codes = {rank: now.codes[rank] for rank in now.codes.keys() - self.complete}
        result = [
            failure
            for failure in failures.of_ranks(self.records, codes, now.pids)
            if codes.get(failure.rank) is not None
        ]
        for rank, code in codes.items():
            if code == 0:
                text = "before it returned a result"
                result.append(failures.of_exit(0, rank, now.pids[rank], message=text))
        return result


def _error_of(failed: Sequence[Failure], finished: Iterable[int]) -> Exception:
    cause = failures.first(failed)
    assert cause is not None
    if UsageError(cause.message).code == "launch-not-guarded":
        return UsageError(cause.message)
    note = failures.advice(failed, finished)
    return failures.worker_failed(replace(cause, note=note))
