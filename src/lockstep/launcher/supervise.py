"""Start ranks, watch them, stop them, and report in the end what went wrong: the engine of
`lockstep run` and `lockstep train`.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from lockstep.config.knob import whole
from lockstep.config.launching import Launch
from lockstep.errors import ExitCode, UsageError
from lockstep.launcher import ending, failures, processes, stalls
from lockstep.launcher.console import forwarded
from lockstep.launcher.ending import Endings
from lockstep.launcher.engine import Ended, Farewell, LocalRanks, Ranks, Stopped, alone
from lockstep.launcher.failures import Failure
from lockstep.launcher.logs import Console, LogPlace, log_of, log_place, tail
from lockstep.launcher.preemption import Stop, noted, say
from lockstep.launcher.rank import Program, Rank, Target
from lockstep.launcher.stalls import Stall, Watcher
from lockstep.launcher.stalls_of_nodes import OtherNodes
from lockstep.launcher.start import FOR_SCRIPTS, FOR_TRAININGS, fork_server, gpus, set_by
from lockstep.runtime import status
from lockstep.runtime.environment import timeout_for_ranks
from lockstep.runtime.private import run_directory

_SILENT_SECONDS = 1.0  # while ranks end, before the user is told what is waited for


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended. `exit_code`: 0, the first failing rank's own, 75 when it was stopped and
    saved, or 128 + n when signal n stopped it.
    """

    exit_code: int
    failure: Failure | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """This node's part of a run on several nodes."""

    ranks: LocalRanks
    called_off: Callable[[], bool] = lambda: False
    """Returns whether its ranks shall end because the run has ended elsewhere."""
    elsewhere: OtherNodes | None = None
    """What the other nodes know of their ranks, to find the rank that a stalled run waits for."""


def supervise(
    target: Target,
    workers: int | None = None,
    *,
    logs: Path | None = None,
    console: Console = "all",
    environment: Mapping[str, str] | None = None,
    heeds: bool = False,
    launch: Launch | None = None,
    share: Share | None = None,
    passing: Callable[[Failure], bool] = lambda failure: False,
    reports: bool = True,
) -> Outcome:
    """Run `target` on `workers` ranks of this host and wait for all of them. None: as many as there
    are GPUs, else one.

    If a rank fails, the others are stopped within two seconds, and its failure is the last thing
    printed to stderr. SIGINT, SIGTERM, SIGHUP, SIGUSR1 and SIGQUIT stop all ranks and print one
    line. Ranks that heed signals (`World.heed_signals`) first finish their step, save and exit,
    unless a second signal or SIGQUIT comes. No process is left running, whichever way this process
    ends.

    Args:
        logs: an existing directory; each rank's output goes to rank-N.log there. None: a
            temporary directory, which is kept if a rank fails.
        console: which ranks may write to the terminal. The others' output goes to their log only.
        environment: variables for the ranks; they override this process's own.
        launch: how long a collective may take, what to do on a stall, and whether ranks start cold
            or log more. Default: the run ends after half a minute without progress, and names the
            rank that the others wait for.
        heeds: the target heeds signals from its start, and can be started again if it was stopped
            before it could save.
        passing: returns whether `logs` will be removed after this failure, so that the report must
            not name it.
        share: this node's part, if there are several nodes.
        reports: print how the run ended; if false, the caller does (`conclude`).

    Raises:
        UsageError: workers < 1.
    """
    if workers is not None:
        whole("workers", workers)
    with noted(speaks=reports) as stop, run_directory() as directory, log_place(logs) as place:
        launch = launch or Launch()
        elsewhere = None if share is None else share.elsewhere
        watch = Watch(directory, stop, launch, elsewhere)
        rank = Rank(
            rank=0,
            work=target,
            records=str(directory),
            console=console,
            logs=str(place.path),
            heeds=heeds,
            debug=launch.debug,
        )
        variables = {**(environment or {}), **timeout_for_ranks(launch.timeout)}
        start = _Start(
            rank=rank,
            watch=watch,
            environment=variables,
            share=share,
            cold=launch.cold or launch.debug,
        )
        try:
            outcome = start.run(workers)
        except Stopped:
            outcome = (
                Outcome(128 + (stop.number or 0))
                if watch.failure is None
                else Outcome(watch.failure.code, watch.failure)
            )
        if (
            outcome.failure is not None
            and outcome.exit_code != ExitCode.PREEMPTED
            and stop.number is None
        ):
            outcome = replace(outcome, failure=_with_log(outcome.failure, place, console, passing))
        return conclude(outcome, stop, heeds=heeds) if reports else outcome


def conclude(outcome: Outcome, stop: Stop, *, heeds: bool) -> Outcome:
    """Print how a run ended, if it did not end well. Return its outcome; a run that was asked to
    stop, and did, gets the exit code for that.
    """
    killed = outcome.failure if outcome.failure is not None and outcome.failure.killed else None
    if stop.number is not None and (
        killed is not None or outcome.exit_code in (ExitCode.PREEMPTED, 128 + stop.number)
    ):
        if killed is not None:  # killed while it was stopping: that causes no restart
            say(failures.summary(killed))
        outcome = Outcome(stop.exit_code(saved=heeds or outcome.exit_code == ExitCode.PREEMPTED))
        say(f"stopped by {stop.name}; all ranks have ended")
    elif outcome.failure is not None and outcome.exit_code != ExitCode.PREEMPTED:
        say(failures.render(outcome.failure))
    return outcome


class Watch:
    """Watches ranks that were started together, and that leave their pages and records in
    `directory`.
    """

    def __init__(
        self, directory: Path, stop: Stop, launch: Launch, elsewhere: OtherNodes | None = None
    ) -> None:
        """`elsewhere`: the other hosts, for whose ranks these might be waiting."""
        self.directory = directory
        self.stop = stop
        self._launch = launch
        self._elsewhere = elsewhere
        self._watcher = Watcher(directory, launch.stall_after, elsewhere=elsewhere)
        self._endings = Endings(directory)
        self._oom_kills = processes.oom_kills()
        self.failure: Failure | None = None
        """The failure of a rank that the others waited for, once the ranks are to be ended because
        of it.
        """

    def must_end(self, pids: Mapping[int, int]) -> Farewell | None:
        """Return how to end the ranks now, None if they go on. `pids` are the living ranks' pids,
        by rank.
        """
        if self.stop.now(self.directory, pids):
            return self._farewell()
        for text in self._endings.look(pids):
            say(text)
        stall = self._watcher.look(pids)
        if self._elsewhere is not None:
            stall = self._elsewhere.verdict()
        if stall is not None:
            if self._launch.on_stall != "wait" and not stall.works:
                if stall.rank not in pids and self._elsewhere is not None:
                    return None  # its own host ends the run
                self.failure = _failure(stall, pids)
                return Farewell()
            say("\n".join(part for part in (stall.stack, stall.message) if part))
        if (slow := self._watcher.slow(pids)) is not None:
            say(slow)
        return None

    def _farewell(self) -> Farewell:
        """Return how ranks that do not stop by themselves are ended: their own handlers have the
        launch's grace period, until a second signal.
        """
        stop, number = self.stop, signal.SIGTERM
        if stop.number == signal.SIGUSR1:
            number = signal.SIGUSR1
        spoken_at = time.monotonic() + _SILENT_SECONDS

        def hurried() -> bool:
            nonlocal spoken_at
            if time.monotonic() > spoken_at:
                spoken_at = math.inf
                stop.speak(f"the ranks have {self._launch.grace:.0f} s to end")
            return stop.at_once

        return Farewell(number, self._launch.grace, hurried)

    def explained(self, failure: Failure, ranks: Iterable[int] = ()) -> Failure:
        """Add to `failure` what the rank did last, in what `ranks` differed if it was aborted, and
        whether the kernel killed processes for lack of memory.
        """
        view = status.read(status.file_of(self.directory, failure.rank))
        doing = (
            ""
            if view is None or not view.step
            else f"at step {view.step}, {stalls.DOING[view.phase]}"
        )
        aborted = failure.code == 128 + signal.SIGABRT
        apart = stalls.difference(self.directory, ranks) if aborted else ""
        killed = processes.oom_kills() - self._oom_kills if failure.code == 128 + 9 else 0
        return replace(
            failure,
            doing=doing,
            note=(
                f"cgroup oom_kill +{killed}: the host's memory ran out"
                if killed > 0
                else apart or failure.note
            ),
        )


def _failure(stall: Stall, pids: Mapping[int, int]) -> Failure:
    return Failure(
        rank=stall.rank,
        kind="stall",
        message=stall.message,
        code=ExitCode.HANG,
        pid=pids.get(stall.rank, 0),
        traceback=stall.stack,
    )


@dataclass(kw_only=True, slots=True)
class _Start:
    """This host's ranks from their start to their end."""

    rank: Rank
    """The work of each rank, except for its number."""
    watch: Watch
    environment: Mapping[str, str]
    share: Share | None
    cold: bool

    def run(self, workers: int | None) -> Outcome:
        """Run the ranks. Raises Stopped if they were ended because of a signal or a stall."""
        self._heed()
        server = fork_server(
            FOR_TRAININGS if self.rank.work.ours else FOR_SCRIPTS,
            {**os.environ, **self.environment},
            cold=self.cold,
        )
        server.ready(self._heed)
        count, share = gpus() or 1 if workers is None else workers, self.share
        with (
            alone(server, count) if share is None else nullcontext(share.ranks) as place,
            self._console(place.numbers) as pipes,
            Ranks(server, place) as ranks,
        ):

            def process(
                number: int, variables: Mapping[str, str]
            ) -> tuple[Rank, Mapping[str, str]]:
                work = replace(self.rank, rank=number, pipes=pipes)
                own = {
                    **variables,
                    **self.environment,
                    failures.DIRECTORY: str(self.watch.directory),
                }
                return work, {**os.environ, **own}

            def of_ranks(ended: Ended) -> Sequence[Failure]:
                return failures.of_ranks(self.watch.directory, ended.codes, ended.pids)

            called_off = (lambda: False) if share is None else share.called_off
            ranks.start(
                process,
                cold=_sets_variables(self.rank.work),
                beside=self.rank.work.beside(),
            )
            ended = ranks.run(
                failures=of_ranks,
                stopping=self.watch.must_end,
                called_off=called_off,
            )
        return self._outcome(ended, of_ranks(ended), place.size)

    def _heed(self) -> None:
        if self.watch.must_end({}) is not None:
            raise Stopped

    @contextmanager
    def _console(self, ranks: range) -> Iterator[str | None]:
        """Print the ranks' output, joined, if that is asked for and there are several ranks. Yields
        the directory with their pipes, or None.
        """
        if self.rank.console != "joined" or ranks == range(1):
            yield None
            return
        with forwarded(self.watch.directory, ranks):
            yield str(self.watch.directory)

    def _outcome(self, ended: Ended, found: Sequence[Failure], size: int) -> Outcome:
        cause = failures.first(found)
        if cause is None:
            if text := ending.of_strangers(self.watch.directory, ended.pids, size):
                _say(text)
            return Outcome(ExitCode.OK)
        note = failures.finished_early(
            found, [rank for rank, code in ended.codes.items() if code == 0]
        )
        return Outcome(cause.code, self.watch.explained(replace(cause, note=note), ended.pids))


def _sets_variables(work: Program) -> bool:
    """Whether the script sets a variable that takes effect when a library starts: too late for a
    warm rank. If so, print that.
    """
    script = work.script if isinstance(work, Target) else None
    name = "" if script is None else set_by(Path(script))
    if name:
        what = f"{script} sets {name}, which acts as torch is imported"
        _say(
            f"lockstep: ranks start without preloaded modules, which takes longer: {what}; set it"
            " in the command's environment instead"
        )
    return bool(name)


def _with_log(
    failure: Failure, place: LogPlace, console: Console, passing: Callable[[Failure], bool]
) -> Failure:
    """Add to `failure` its rank's log file, and the end of that file if it was not on the terminal.
    A usage error needs neither.
    """
    if failure.kind == "usage":
        return failure
    file = log_of(place.path, failure.rank)
    place.keep = True
    log = "" if passing(failure) else str(file)
    return replace(
        failure, log=log, tail=tail(file) if console == "first" and failure.rank > 0 else ""
    )


RESTARTS = 3


@dataclass(frozen=True, slots=True)
class Workers:
    """The least and the most workers of a run."""

    least: int
    most: int

    @classmethod
    def read(cls, text: str) -> Workers:
        """Parse `4` or `1:4`. Raises UsageError for anything else."""
        first, colon, last = text.partition(":")
        last = last if colon else first
        if first.isdigit() and last.isdigit() and 1 <= int(first) <= int(last):
            return cls(int(first), int(last))
        expected = "a number of at least 1, or the least and the most as in 1:4"
        raise UsageError("wrong-value", name="workers", value=text, expected=expected)

    @property
    def elastic(self) -> bool:
        return self.least < self.most


def run_with_restarts(
    start: Callable[[int], Outcome],
    workers: Workers,
    restarts: int,
    stopped_to_grow: Callable[[], bool],
    *,
    after_stalls: bool = False,
) -> Outcome:
    """Call `start(count)` once, and again for each restart. Return the last outcome.
    `after_stalls`: restart after a stall too.

    `stopped_to_grow()` returns whether ranks that ended well did so at a checkpoint, to continue
    with more workers.
    """
    count, left = workers.most, restarts
    while True:
        outcome = start(count)
        if outcome.exit_code == 0 and stopped_to_grow():
            count = workers.most
            _say(f"restart: {_counted(count)} again, from the newest checkpoint")
            continue
        failure = outcome.failure
        if (
            failure is None
            or left == 0
            or not (failure.killed or (after_stalls and failure.kind == "stall"))
        ):
            return outcome
        left -= 1
        count = max(workers.least, count - 1)
        _say(
            f"restart {restarts - left} of {restarts}: {_counted(count)}, from the newest checkpoint"
        )


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _counted(count: int) -> str:
    return f"{count} worker{'s' * (count > 1)}"
