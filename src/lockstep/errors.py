"""Everything that Lockstep raises on purpose.

    LockstepError                 something that Lockstep can put into a sentence
    ├── UsageError                a value that the user gave cannot work; also a ValueError
    │   └── TaskError             a task's name, its file, or what its task() returned
    ├── BarrierTimeout            some ranks did not reach a barrier in time; `missing` says which
    ├── CollectiveMismatch        ranks called different collectives; `number` says at which
    ├── CollectiveTimeout         some ranks did not come to a collective in time; `missing` says
                                  which
    ├── DamagedCheckpoint         a checkpoint is not as it was written; `file` says which of its
                                  files
    ├── LoaderWorkerKilled        a process that loads data for this rank was killed; `signal` says
                                  by what
    ├── ReplicaDivergence         replicas that must be equal are not; `parameter` and `ranks` say
                                  where
    ├── UnusedParameters          parameters got no gradient on any rank; `names` says which
    ├── ScheduleError             a schedule of a collective does not do what it claims
    ├── LateGradient              a gradient arrived for a bucket that had already left
    ├── PeerFailed                this rank is well, another one has failed or gone; the cause is
                                  told there
    ├── WorkerFailed              a rank started by `lockstep.launch` failed; `rank` and `traceback`
                                  say where
    └── LaunchTimeout             ranks started by `lockstep.launch` were still running at its
                                  timeout; also a TimeoutError

Beside them, `Preempted` ends a process as sys.exit(75) does: a training was asked to stop, and has
saved.

A message names the offending values, the relation that is broken and the fix.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum


class ExitCode(IntEnum):
    """What the commands exit with; a worker killed by signal n gives 128 + n."""

    OK = 0
    FAILED = 1
    USAGE = 2
    PREEMPTED = 75
    """Asked to stop, and saved: the same command goes on. (EX_TEMPFAIL: a scheduler may put the
    job into its queue again.)
    """
    HANG = 76
    """A rank was waited for longer than is allowed."""
    NO_CHECKPOINT = 77
    """--resume, and there is none that is whole."""


class LockstepError(RuntimeError):
    """Base class: catch this to catch everything that Lockstep raises on purpose."""


class LockstepWarning(UserWarning):
    """Something that Lockstep did and that you may not have meant. Said once."""


class UsageError(LockstepError, ValueError):
    """A value that the user gave cannot work. The commands print it without a traceback and exit
    with 2.
    """


class TaskError(UsageError):
    """A task cannot be found, its file has no `task()`, or `task()` returned something else."""


class BarrierTimeout(LockstepError):
    """Some ranks did not reach a barrier in time. Raised on every rank, also on the late ones
    when they arrive.
    """

    def __init__(self, message: str, missing: Sequence[int]) -> None:
        super().__init__(message)
        self.missing = tuple(missing)


class CollectiveMismatch(LockstepError):
    """Ranks called different collectives as their number `number`. Raised on every rank, before
    any data is mixed.
    """

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.number = number


class ScheduleError(LockstepError):
    """A schedule of a collective does not do what it claims: says the round, the ranks and the
    cell.
    """


class CollectiveTimeout(LockstepError):
    """Some ranks did not come to a collective in time."""

    def __init__(self, message: str, missing: Sequence[int]) -> None:
        super().__init__(message)
        self.missing = tuple(missing)


class DamagedCheckpoint(LockstepError):
    """A checkpoint whose `file` is missing, was cut short or has been changed since it was
    written.
    """

    def __init__(self, message: str, file: str) -> None:
        super().__init__(message)
        self.file = file


class LoaderWorkerKilled(LockstepError):
    """A process that loads data for this rank was killed by `signal`."""

    def __init__(self, message: str, signal: int) -> None:
        super().__init__(message)
        self.signal = signal


class ReplicaDivergence(LockstepError):
    """Replicas that must be equal are not: `parameter` (or buffer, optimizer state, setting) of
    `ranks` differs from the others'. Raised on every rank.
    """

    def __init__(self, message: str, parameter: str, ranks: Sequence[int]) -> None:
        super().__init__(message)
        self.parameter = parameter
        self.ranks = tuple(ranks)


class UnusedParameters(LockstepError):
    """Parameters got no gradient on any rank. Raised on every rank, before the optimizer steps."""

    def __init__(self, message: str, names: Sequence[str]) -> None:
        super().__init__(message)
        self.names = tuple(names)


class LateGradient(LockstepError):
    """A gradient arrived for a bucket whose sum had already left for the other ranks."""


class WorkerFailed(LockstepError):
    """A rank failed. `rank` is the first that did; `traceback` is that rank's own, as text (""
    after a signal).
    """

    def __init__(self, message: str, rank: int, traceback: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.traceback = traceback


class PeerFailed(LockstepError):
    """This rank is well, but another one has failed or gone. Never reported as the cause of a
    run's end if there is a better one.
    """


class Preempted(SystemExit):
    """A training was asked to stop (SIGTERM, SIGUSR1), and did so after `step`, on all ranks;
    `saved` says whether it can be resumed.
    """

    def __init__(self, step: int, saved: bool) -> None:
        super().__init__(int(ExitCode.PREEMPTED))
        self.step, self.saved = step, saved


class LaunchTimeout(LockstepError, TimeoutError):
    """Ranks started by `lockstep.launch` were still running when its timeout ended; `running`
    says which. They were killed.
    """

    def __init__(self, message: str, running: Sequence[int]) -> None:
        super().__init__(message)
        self.running = tuple(running)
