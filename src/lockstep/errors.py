"""Every exception that Lockstep raises on purpose. Catch `LockstepError` to catch them all::

    LockstepError                 the base class
    ├── UsageError                a value that you gave cannot work; also a ValueError
    │   └── TaskError             a task's name, its file, or what its task() returned
    ├── BarrierTimeout            some ranks did not reach a barrier in time: `missing`
    ├── CollectiveMismatch        ranks called different collectives, at number `number`
    ├── CollectiveTimeout         some ranks did not reach a collective in time: `missing`
    ├── CorruptResult             a rank computed, added or received something wrong:
    │                             `parameter`, `ranks`
    ├── DamagedCheckpoint         a checkpoint is not as it was written: `file`
    ├── LoaderWorkerKilled        a process that loads data was killed by `signal`
    ├── ReplicaDivergence         replicas that must be equal differ: `parameter`, `ranks`
    ├── UnusedParameters          parameters got no gradient on any rank: `names`
    ├── ScheduleError             a schedule of a collective does not do what it claims
    ├── LateGradient              a gradient arrived for a bucket that had been sent already
    ├── PeerFailed                this rank works, but another rank has failed
    ├── WorkerFailed              a rank of `lockstep.launch` failed: `rank`, `traceback`
    └── LaunchTimeout             ranks of `lockstep.launch` were running at its timeout:
                                  `running`; also a TimeoutError

`Preempted` is not a LockstepError: it ends a process as sys.exit(75) does, after a training was
asked to stop and has stopped.

Each error has a code. `lockstep explain CODE` prints its message, cause and fix from errors.toml.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from enum import IntEnum
from functools import cache, partial
from pathlib import Path
from string import Formatter
from typing import Any, Self

_CODE = re.compile(r"[a-z0-9]+(?:-[a-z0-9]+)+")
_CODE_AT_END = re.compile(rf" \[({_CODE.pattern})\](?=\n|$)")  # of a sentence


class ExitCode(IntEnum):
    """What the commands exit with. A worker that signal n killed gives 128 + n.

    Attributes:
        OK: 0.
        FAILED: 1, the training or the check failed.
        USAGE: 2, a value cannot work.
        PREEMPTED: 75, asked to stop, and saved: the same command resumes. A scheduler may put the
            job into its queue again.
        HANG: 76, no rank made progress: the others waited for one rank longer than allowed.
        NO_CHECKPOINT: 77, --resume was given, and there is no whole checkpoint.
    """

    OK = 0
    FAILED = 1
    USAGE = 2
    PREEMPTED = 75
    HANG = 76
    NO_CHECKPOINT = 77


class LockstepError(RuntimeError):
    """Base class: catch this to catch everything that Lockstep raises on purpose.

    Attributes:
        code: the stable code of the error, in kebab-case; "" for a sentence without a code.
        values: the values that the sentence contains.

    Args:
        code: the code of an entry in errors.toml. Any other text is the sentence itself, for
            example from another rank.
        values: the values for the placeholders in the entry's message.
    """

    def __init__(self, code: str, **values: Any) -> None:
        super().__init__(code)
        first, _, _ = code.partition("\n")
        match = _CODE_AT_END.search(first)
        self.code = ""
        if match:
            self.code = match[1]
        elif _CODE.fullmatch(code):
            self.code = code
        self.values = values
        self._places = ""

    def within(self, place: str) -> Self:
        """Return the same error, with a place before its sentence.

        Args:
            place: where the value was found.
        """
        self._places = f"{place}: {self._places}"
        return self

    @property
    def sentence(self) -> str:
        """The message: what is wrong and what to do, without the code."""
        text = str(self.args[0])
        if text == self.code:
            text = sentence(text, self.values)
        elif self.code:
            text = _CODE_AT_END.sub("", text, count=1)
        return self._places + text

    def __str__(self) -> str:
        first, newline, rest = self.sentence.partition("\n")
        if self.code:
            return f"{first} [{self.code}]{newline}{rest}"
        return self.sentence

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), **self.values), self.args, vars(self)


def catalog() -> Mapping[str, Mapping[str, str]]:
    """Return the message, cause and fix of every error, by code."""
    import tomllib  # needed only to explain errors

    entries: dict[str, Mapping[str, str]] = {}
    for room_entries in tomllib.loads(_entries()).values():
        entries |= room_entries
    return entries


@cache
def entry_of(code: str) -> Mapping[str, str]:
    """Return the entry of one error; empty for an unknown code. Only this entry is parsed, not the
    whole file, so that an error is printed at once.
    """
    import tomllib

    pattern = rf"^\[\w+\.{re.escape(code)}\]\n((?:(?!\[).*\n)+)"
    match = re.search(pattern, _entries(), re.MULTILINE)
    return tomllib.loads(match[1]) if match else {}


def _entries() -> str:
    return Path(__file__).with_name("errors.toml").read_text(encoding="utf-8")


class _Sentences(Formatter):
    """Formats `{count:# rank}` as "1 rank" or "2 ranks", and separates list members by commas."""

    def format_field(self, value: Any, spec: str) -> str:
        if spec.startswith("#"):
            return f"{value:,} {spec[1:].strip()}{'s' * (value != 1)}"
        if isinstance(value, list | tuple):
            return ", ".join(map(str, value))
        return str(format(value, spec))


def sentence(code: str, values: Mapping[str, Any]) -> str:
    """Return the message of an error.

    Args:
        code: the code of the error.
        values: the values for the placeholders in the message.
    """
    try:
        return _Sentences().vformat(entry_of(code)["message"], (), values)
    except (OSError, LookupError):  # an incomplete installation: the values still help
        return ", ".join([code, *(f"{name}={value!r}" for name, value in values.items())])


class LockstepWarning(UserWarning):
    """Lockstep did something that you may not have meant. The warning is shown once."""


class UsageError(LockstepError, ValueError):
    """A value that you gave cannot work. Commands print no traceback, and exit with 2."""


class TaskError(UsageError):
    """A task was not found, its file has no `task()`, or `task()` returned something else."""


class _RanksMissing(LockstepError):
    def __init__(self, code: str, *, missing: Sequence[int], **values: Any) -> None:
        super().__init__(code, missing=missing, **values)
        self.missing = tuple(missing)


class _RanksDiffer(LockstepError):
    def __init__(self, code: str, *, parameter: str, ranks: Sequence[int], **values: Any) -> None:
        super().__init__(code, parameter=parameter, ranks=ranks, **values)
        self.parameter = parameter
        self.ranks = tuple(ranks)


class BarrierTimeout(_RanksMissing):
    """Some ranks did not reach a barrier in time. Raised on every rank, also on the late ones
    when they arrive.
    """


class CollectiveMismatch(LockstepError):
    """Ranks called different collectives as their number `number`. Raised on every rank, before
    any data is mixed.
    """

    def __init__(self, code: str, *, number: int, **values: Any) -> None:
        super().__init__(code, number=number, **values)
        self.number = number


class ScheduleError(LockstepError):
    """A schedule of a collective computes a wrong result. The message names the round, the ranks
    and the cell.
    """


class CollectiveTimeout(_RanksMissing):
    """Some ranks did not reach a collective in time."""


class CorruptResult(_RanksDiffer):
    """In a step, `ranks` have another value of `parameter` than the other ranks that computed the
    same (`witness`). Raised on every rank.
    """


class DamagedCheckpoint(LockstepError):
    """A checkpoint whose `file` is missing, was cut short or has been changed since it was
    written.
    """

    def __init__(self, code: str, *, file: str, **values: Any) -> None:
        super().__init__(code, file=file, **values)
        self.file = file


class LoaderWorkerKilled(LockstepError):
    """A process that loads data for this rank was killed by `signal`."""

    def __init__(self, code: str, *, signal: int, **values: Any) -> None:
        super().__init__(code, signal=signal, **values)
        self.signal = signal


class ReplicaDivergence(_RanksDiffer):
    """Replicas that must be equal are not: `parameter` (or buffer, optimizer state, setting) of
    `ranks` differs from the others'. Raised on every rank.
    """


class UnusedParameters(LockstepError):
    """Parameters got no gradient on any rank. Raised on every rank, before the optimizer steps."""

    def __init__(self, code: str, *, names: Sequence[str], **values: Any) -> None:
        super().__init__(code, names=names, **values)
        self.names = tuple(names)


class LateGradient(LockstepError):
    """A gradient arrived for a bucket that had already been sent to the other ranks."""


class WorkerFailed(LockstepError):
    """A rank failed. `rank` is the first that did; `traceback` is that rank's own, as text (""
    after a signal).
    """

    def __init__(self, code: str, *, rank: int, traceback: str = "", **values: Any) -> None:
        super().__init__(code, rank=rank, **values)
        self.rank = rank
        self.traceback = traceback


class PeerFailed(LockstepError):
    """This rank works, but another rank has failed or exited. It is never reported as the cause of
    a run's end if there is a better cause.
    """


class Preempted(SystemExit):
    """A training was asked to stop (SIGTERM, SIGUSR1), and did so after `step`, on all ranks;
    `saved` says whether it can be resumed.
    """

    def __init__(self, step: int, saved: bool) -> None:
        super().__init__(int(ExitCode.PREEMPTED))
        self.step = step
        self.saved = saved


class LaunchTimeout(LockstepError, TimeoutError):
    """Ranks started by `lockstep.launch` were still running when its timeout ended; `running`
    says which. They were killed.
    """

    def __init__(self, code: str, *, running: Sequence[int], **values: Any) -> None:
        super().__init__(code, running=running, **values)
        self.running = tuple(running)
