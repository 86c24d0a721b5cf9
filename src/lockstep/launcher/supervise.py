"""Start ranks, watch them, stop them, and say in the end what went wrong: the engine of `lockstep run` and `lockstep train`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from lockstep import orphans
from lockstep.errors import ExitCode, UsageError
from lockstep.launcher import alone, failures
from lockstep.launcher.asked import SPARE, mark
from lockstep.launcher.failures import Failure, signal_name
from lockstep.launcher.forward import forwarded
from lockstep.launcher.hosts.messages import Share
from lockstep.launcher.log_place import LogPlace, log_of, log_place, tail
from lockstep.launcher.logs import Console
from lockstep.launcher.private import run_directory
from lockstep.launcher.stopping import noted
from lockstep.launcher.watch import Stalls, Watch


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
    """How a run ended. `exit_code`: 0, the first failing rank's own, 75 when it was stopped and saved, or 128 + n when signal n stopped it."""

    exit_code: int
    failure: Failure | None = None


def supervise(
    target: Target,
    workers: int | None = None,
    *,
    logs: Path | None = None,
    console: Console = "all",
    environment: Mapping[str, str] | None = None,
    heeds: bool = False,
    stalls: Stalls | None = None,
    debug: bool = False,
    share: Share | None = None,
    passing: Callable[[Failure], bool] = lambda failure: False,
) -> Outcome:
    """Run `target` on `workers` ranks of this host and wait for all of them. None: as many as there are GPUs, else one.

    When a rank fails the others are stopped within two seconds, and its failure is printed to stderr as the last thing. SIGINT,
    SIGTERM, SIGHUP, SIGUSR1 and SIGQUIT stop everything and leave one line; ranks that heed signals (`World.heed_signals`) are let take their
    step, save and leave first, until a second signal comes. Nothing is left running, whichever way this process ends.

    Args:
        logs: an existing directory; each rank's output goes to rank-N.log there. Without, a temporary one, which is kept if a rank fails.
        console: which ranks may write to the terminal. The others' output goes to their log only.
        environment: variables for the ranks, over this process's own.
        stalls: what is done where the ranks do not get on; default: the run ends after half a minute, naming who is waited for.
        heeds: the target heeds signals from its first moment on, and can be begun anew where it was stopped before it has come to that.
        debug: have libraries say in the logs what they do, and add a line for every collective.
        passing: whether `logs` will be removed after this failure, and so is not named with it.
        share: this host's part where there are several; how it ended is then for the hosts to agree on, and not printed here.

    Raises:
        UsageError: workers < 1.
    """
    if workers is not None and workers < 1:
        raise UsageError(f"workers={workers}: give at least 1")
    with noted() as stop, run_directory() as directory, log_place(logs) as place:
        watch = Watch(directory, stop, stalls or Stalls(), share.elsewhere if share is not None else None)
        options = ["--logs", str(place.path), *(["--debug"] if debug else []), *(["--heeds"] if heeds else [])]
        outcome = _run(target, workers, watch, console, options, dict(environment or {}), share)
        if outcome.failure is not None and outcome.exit_code != ExitCode.PREEMPTED and stop.number is None:
            outcome = replace(outcome, failure=_with_log(outcome.failure, place, console, passing))
    if share is not None:
        return outcome
    killed = outcome.failure if outcome.failure is not None and outcome.failure.killed else None
    if stop.number is not None and (killed is not None or outcome.exit_code in (ExitCode.PREEMPTED, 128 + stop.number)):
        if killed is not None:  # while it was to stop: nothing is begun anew for that
            print(failures.summary(killed), file=sys.stderr)
        outcome = Outcome(stop.exit_code(saved=heeds or outcome.exit_code == ExitCode.PREEMPTED))
        print(f"stopped by {stop.name}; all ranks have ended", file=sys.stderr)
    elif outcome.failure is not None and outcome.exit_code != ExitCode.PREEMPTED:
        print(failures.render(outcome.failure), file=sys.stderr)
    return outcome


def _run(
    target: Target,
    workers: int | None,
    watch: Watch,
    console: Console,
    options: list[str],
    environment: dict[str, str],
    share: Share | None,
) -> Outcome:
    from lockstep.launcher import agent  # imports torch

    directory, stop = watch.directory, watch.stop

    spared: set[int] = set()

    def do_without(now: agent.Ended) -> set[int]:
        for rank, code in now.codes.items():
            if rank not in spared and code is not None and code < 0 and mark(directory, rank, SPARE).exists():
                spared.add(rank)
                print(
                    f"rank {rank} (pid {now.pids[rank]}) was killed by {signal_name(-code)}: the rest go on without it",
                    file=sys.stderr,
                    flush=True,
                )
        return spared

    def explained(now: agent.Ended) -> bool:
        cause = failures.first(_without(_failures(directory, now.codes, now.pids), do_without(now)))
        if cause is not None and cause.code == ExitCode.PREEMPTED:
            return None not in now.codes.values()  # the others are leaving too
        return cause is not None and cause.standing == "cause"

    count = agent.gpus() or 1 if workers is None else workers
    with _pipe(directory) as pipe, _console(console, directory, count) as printing:
        try:
            if stop.now(directory, {}):
                raise agent.Stopped
            ended = agent.run_generation(
                ["-P", "-m", "lockstep.launcher.worker", *options, *printing, *target.arguments()],
                count,
                environment={**environment, failures.DIRECTORY: str(directory), orphans.PARENT: str(os.getpid()), **pipe},
                explained=explained,
                stopping=watch.must_end,
                spared=do_without,
                share=share,
            )
        except agent.Stopped:
            if watch.failure is not None:
                return Outcome(watch.failure.code, watch.failure)
            assert stop.number is not None
            return Outcome(128 + stop.number)
    outcome = _outcome(_without(_failures(directory, ended.codes, ended.pids), spared), ended.codes)
    if outcome.failure is None and (text := alone.warning(directory, ended.pids, count if share is None else share.roll.size)):
        print(text, file=sys.stderr, flush=True)
    return outcome if outcome.failure is None else replace(outcome, failure=watch.explained(outcome.failure))


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


def _without(found: Sequence[Failure], spared: Collection[int]) -> Sequence[Failure]:
    """Less those of ranks that could be done without; unless what the others say is that they could not."""
    others = [failure for failure in found if failure.rank not in spared]
    cause = failures.first(others)
    return others if cause is None or cause.standing == "cause" else found


def _with_log(failure: Failure, place: LogPlace, console: Console, passing: Callable[[Failure], bool]) -> Failure:
    """With its rank's log file, and the end of it where that was not on the terminal. A usage error needs neither."""
    if failure.kind == "usage":
        return failure
    file = log_of(place.path, failure.rank)
    place.keep = True
    log = "" if passing(failure) else str(file)
    return replace(failure, log=log, tail=tail(file) if console == "first" and failure.rank > 0 else "")


@contextmanager
def _console(console: Console, directory: Path, count: int) -> Iterator[list[str]]:
    """Print what ranks say, joined, where that is asked for and there are several; gives the ranks' options for it."""
    if console != "joined" or count == 1:
        yield ["--console", console]
        return
    with forwarded(directory, count):
        yield ["--console", console, "--pipes", str(directory)]


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
