"""Start ranks, watch them, stop them, and say in the end what went wrong: the engine of `lockstep run` and `lockstep train`."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType

from lockstep import orphans
from lockstep.errors import ExitCode, UsageError
from lockstep.launcher import failures
from lockstep.launcher.failures import Failure
from lockstep.launcher.hosts.messages import Share
from lockstep.launcher.logs import Console
from lockstep.launcher.private import run_directory

_HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """What every rank runs as `__main__`: a script or a module, with arguments."""

    script: str | None = None
    module: str | None = None
    args: Sequence[str] = ()

    def __post_init__(self) -> None:
        if (self.script is None) == (self.module is None):
            raise UsageError(f"script={self.script!r} and module={self.module!r}: give exactly one")
        if self.script is not None and not Path(self.script).exists():
            raise UsageError(f"script {self.script!r} does not exist (looked from {os.getcwd()})")

    def arguments(self) -> list[str]:
        """For the worker's command line."""
        named = ["--script", self.script] if self.script is not None else ["--module", self.module or ""]
        return [*named, "--", *self.args]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended. `exit_code`: 0, the first failing rank's own, or 128 + n when signal n stopped the launcher."""

    exit_code: int
    failure: Failure | None = None


def supervise(
    target: Target,
    workers: int | None = None,
    *,
    logs: Path | None = None,
    console: Console = "all",
    environment: Mapping[str, str] | None = None,
    share: Share | None = None,
) -> Outcome:
    """Run `target` on `workers` ranks of this host and wait for all of them. None: as many as there are GPUs, else one.

    When a rank fails the others are stopped within two seconds, and its failure is printed to stderr as the last thing. SIGINT,
    SIGTERM, SIGHUP and SIGQUIT stop everything and leave one line. Nothing is left running, whichever way this process ends.

    Args:
        logs: an existing directory; each rank's output goes to rank-N.log there.
        console: which ranks may write to the terminal. The others' output goes to their log only.
        environment: variables for the ranks, over this process's own.
        share: this host's part where there are several; how it ended is then for the hosts to agree on, and not printed here.

    Raises:
        UsageError: workers < 1.
    """
    if workers is not None and workers < 1:
        raise UsageError(f"workers={workers}: give at least 1")
    with _signals() as stop, run_directory() as directory:
        outcome = _run(target, workers, stop, directory, [*_log_options(logs), "--console", console], dict(environment or {}), share)
    if share is not None:
        return outcome
    if stop.number is not None:
        name = "Ctrl-C" if stop.number == signal.SIGINT else failures.signal_name(stop.number)
        print(f"stopped by {name}; all ranks have ended", file=sys.stderr)
    elif outcome.failure is not None:
        print(failures.render(outcome.failure), file=sys.stderr)
    return outcome


def _run(
    target: Target,
    workers: int | None,
    stop: _Stop,
    directory: Path,
    options: list[str],
    environment: dict[str, str],
    share: Share | None,
) -> Outcome:
    from lockstep.launcher import agent  # imports torch

    def explained(now: agent.Ended) -> bool:
        cause = failures.first(_failures(directory, now.codes, now.pids))
        return cause is not None and cause.standing == "cause"

    with _pipe(directory) as pipe:
        try:
            if stop.number is not None:
                raise agent.Stopped
            ended = agent.run_generation(
                ["-P", "-m", "lockstep.launcher.worker", *options, *target.arguments()],
                agent.gpus() or 1 if workers is None else workers,
                environment={**environment, failures.DIRECTORY: str(directory), orphans.PARENT: str(os.getpid()), **pipe},
                explained=explained,
                stopping=lambda: stop.number is not None,
                share=share,
            )
        except agent.Stopped:
            assert stop.number is not None
            return Outcome(128 + stop.number)
    return _outcome(_failures(directory, ended.codes, ended.pids), ended.codes)


def _outcome(found: Sequence[Failure], codes: Mapping[int, int | None]) -> Outcome:
    cause = failures.first(found)
    if cause is None:
        return Outcome(ExitCode.OK)
    cause = replace(cause, note=failures.finished_early(found, [rank for rank, code in codes.items() if code == 0]))
    return Outcome(cause.code, cause)


def _failures(directory: Path, codes: Mapping[int, int | None], pids: Mapping[int, int]) -> list[Failure]:
    """The records that ranks left, and for those that died without one what the system says."""
    found = {failure.rank: failure for failure in failures.read_all(directory)}
    for rank, code in codes.items():
        if code and rank not in found:
            stack = directory / f"rank-{rank}.stack"
            dump = stack.read_text(errors="replace") if stack.exists() else ""
            found[rank] = failures.of_exit(code, rank, pids[rank], traceback=failures.readable_stack(dump))
    return list(found.values())


def _log_options(logs: Path | None) -> list[str]:
    return [] if logs is None else ["--logs", str(logs)]


class _Stop:
    """The signal that asked this process to stop. The handler only notes it: whoever waits looks here."""

    def __init__(self) -> None:
        self.number: int | None = None

    def note(self, number: int, frame: FrameType | None) -> None:
        self.number = number


@contextmanager
def _signals() -> Iterator[_Stop]:
    """Note signals instead of dying from them, except those that were ignored before (nohup, background jobs)."""
    stop = _Stop()
    before = {number: signal.getsignal(number) for number in _HANDLED}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, stop.note)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _pipe(directory: Path) -> Iterator[dict[str, str]]:
    """Where the kernel does not tell ranks that the launcher has died: a FIFO that this process holds open for as long as it lives."""
    if sys.platform == "linux":
        yield {}
        return
    path = directory / "parent"
    os.mkfifo(path, 0o600)
    end = os.open(path, os.O_RDWR)
    try:
        yield {orphans.PARENT_PIPE: str(path)}
    finally:
        os.close(end)
