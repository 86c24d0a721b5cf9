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
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from lockstep.config.knob import whole
from lockstep.errors import LaunchTimeout, UsageError
from lockstep.launcher import failures
from lockstep.launcher.call import FunctionCall, anonymous_file, is_whole, read_whole
from lockstep.launcher.console import forwarded
from lockstep.launcher.engine import Ended, Farewell, LocalRanks, Ranks, Stopped, alone
from lockstep.launcher.failures import Failure
from lockstep.launcher.notebook import Cell, in_kernel
from lockstep.launcher.rank import Rank
from lockstep.launcher.stalls import Watcher
from lockstep.launcher.start import FOR_SCRIPTS, fork_server
from lockstep.runtime.private import run_directory

_AT_ONCE = Farewell(seconds=0.0)

R = TypeVar("R")


def launch(
    fn: Callable[..., R],
    workers: int = 2,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    timeout: timedelta | None = None,
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
    __tracebackhide__ = True  # for notebooks and pytest: the message holds the rank's traceback
    try:
        return start_ranks(fn, workers, args, kwargs or {}, timeout=timeout)
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
    variables: Callable[[int], Mapping[str, str]] | None = None,
    place: LocalRanks | None = None,
) -> list[R]:
    """`launch` with further options.

    Args:
        imports: modules to import before ranks are forked.
        variables: returns further environment variables of a rank. With it each rank is a fresh
            interpreter.
        place: the place of these `workers` ranks among those of several nodes. Only their results
            are returned.
    """
    __tracebackhide__ = True
    _check(workers)
    deadline = math.inf if timeout is None else time.monotonic() + timeout.total_seconds()
    with ExitStack() as at_end:
        server = fork_server((*FOR_SCRIPTS, *imports), cold=variables is not None)
        call = FunctionCall.here()
        question, *answers = (_file(at_end) for _ in range(1 + workers))
        handed_over = call.write(question, fn, args, kwargs)
        records = at_end.enter_context(run_directory())
        server.ready()
        if place is None:
            place = at_end.enter_context(alone(server, workers))
        left = _Left(records, dict(zip(place.numbers, answers, strict=True)))
        watcher, waiting = Watcher(records), ""
        late: set[int] = set()
        if cell := Cell() if in_kernel() else None:
            at_end.enter_context(forwarded(records, place.numbers, cell=cell))

        def process(rank: int, of_place: Mapping[str, str]) -> tuple[Rank, Mapping[str, str]]:
            env = {
                **os.environ,
                **of_place,
                **(variables(rank) if variables else {}),
                failures.DIRECTORY: str(records),
            }
            # with it, libraries would take this process for one of torchrun's
            env.pop("TORCHELASTIC_RUN_ID", None)
            pipes = str(records) if cell else None
            return Rank(rank=rank, work=call, records=str(records), pipes=pipes), env

        def stopping(living: Mapping[int, int]) -> Farewell | None:
            nonlocal waiting
            if (stall := watcher.look(living)) is not None:
                print(stall.message, file=sys.stderr, flush=True)
            if time.monotonic() < deadline:
                return None
            late.update(living)
            stall = watcher.present(living)
            waiting = "" if stall is None else stall.message
            return _AT_ONCE

        ranks = at_end.enter_context(Ranks(server, place))
        try:
            ranks.start(
                process,
                call.beside(),
                descriptors=lambda rank: (question, left.answers[rank], *handed_over),
            )
            ended = ranks.run(
                failures=left.failures,
                stopping=stopping,
                spared=lambda now: left.answered,
                farewell=_AT_ONCE,
            )
        except Stopped:
            assert timeout is not None
            raise _late(late, workers, timeout, waiting) from None
        if found := left.failures(ended):
            raise _explained(found, left.answered)
        return [pickle.loads(read_whole(file)) for file in answers]


def _check(workers: object) -> None:
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise UsageError("launch-not-guarded")
    whole("workers", workers, unit="ranks")


def _file(at_end: ExitStack) -> int:
    file = anonymous_file()
    at_end.callback(os.close, file)
    return file


@dataclass(frozen=True, slots=True)
class _Left:
    """What ranks have left: results, and the records of failures."""

    records: Path
    answers: Mapping[int, int]
    """The result files, by rank."""

    @property
    def answered(self) -> set[int]:
        """The ranks that have left a result. After that, how their process ends does not matter."""
        return {rank for rank, file in self.answers.items() if is_whole(file)}

    def failures(self, now: Ended) -> list[Failure]:
        """Return the failures of ranks that have ended without a result."""
        answered = self.answered
        codes = {
            rank: code
            for rank, code in now.codes.items()
            if code is not None and rank not in answered
        }
        early = [
            failures.of_exit(0, rank, now.pids[rank], message="before it returned a result")
            for rank, code in codes.items()
            if code == 0
        ]
        return [
            *(
                failure
                for failure in failures.of_ranks(self.records, codes, now.pids)
                if failure.rank in codes
            ),
            *early,
        ]


def _explained(found: Sequence[Failure], finished: Iterable[int]) -> Exception:
    cause = failures.first(found)
    assert cause is not None
    if UsageError(cause.message).code == "launch-not-guarded":
        return UsageError(cause.message)
    note = failures.finished_early(found, finished)
    return failures.worker_failed(replace(cause, note=note))


def _late(ranks: Iterable[int], size: int, timeout: timedelta, waiting: str) -> LaunchTimeout:
    late = sorted(ranks)
    return LaunchTimeout(
        "launch-timeout",
        who=failures.named(late),
        size=size,
        seconds=timeout.total_seconds(),
        running=late,
        waiting=waiting or "Give a longer timeout.",
    )
