"""Start ranks, watch them, stop them, and report in the end what went wrong: the engine of
`lockstep run` and `lockstep train`.
"""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from lockstep.config.knob import whole
from lockstep.config.launching import Bind, Launch
from lockstep.errors import ExitCode, UsageError
from lockstep.launcher import ending, failures
from lockstep.launcher.console import forwarded
from lockstep.launcher.ending import EndWatcher
from lockstep.launcher.engine import Ended, Farewell, LocalRanks, Ranks, Stopped, alone
from lockstep.launcher.fork_server import Variables
from lockstep.launcher.logs import Console, LogDirectory, log_directory, tail
from lockstep.launcher.rank import Program, Rank, Target
from lockstep.launcher.stall_report import DOING, difference, view_of
from lockstep.launcher.stalls import Watcher
from lockstep.launcher.stalls_of_nodes import OtherNodes
from lockstep.launcher.start import FOR_SCRIPTS, FOR_TRAININGS, fork_server, gpus, set_by
from lockstep.launcher.stop import Stop, note_signals, print_line
from lockstep.runtime import binding, processes
from lockstep.runtime.environment import timeout_for_ranks
from lockstep.runtime.failure_record import Failure, rank_file
from lockstep.runtime.preemption import HEEDS, RESUMED, SAVED, asked_file
from lockstep.runtime.private import run_directory
from lockstep.runtime.processes import Pids

_SILENT_SECONDS = 1.0  # while ranks end, before the user is told what is waited for


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended. `exit_code`: 0, the first failing rank's own, 75 when it was stopped and
    saved, or 128 + n when signal n stopped it.
    """

    exit_code: int
    failure: Failure | None = None
    saved: bool = False
    """Whether the ranks have resumed from a checkpoint, or saved one."""
    grows: bool = False
    """Whether they have saved and ended so that more workers continue."""
    results: Sequence[bytes] = ()
    """What the ranks have returned, if they called a function on a Ray cluster."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """This node's part of a run on several nodes."""

    ranks: LocalRanks
    called_off: Callable[[], bool] = lambda: False
    """Returns whether its ranks shall end because the run has ended elsewhere."""
    elsewhere: OtherNodes | None = None
    """What the other nodes know of their ranks, to find the rank that a stalled run waits for."""
    stop: Stop | None = None
    """Says when the ranks are to stop; None: this process's signals say so."""
    on_checkpoint: Callable[[bool], None] = lambda may_stop: None
    """Called when rank 0 has resumed, and when it has first saved. True: it has saved and heeds
    signals, so that it may be asked to stop.
    """


def supervise(
    target: Target,
    workers: int | None = None,
    *,
    logs: Path | None = None,
    console: Console = "all",
    environment: Variables | None = None,
    heeds: bool = False,
    launch: Launch | None = None,
    share: Share | None = None,
    passing: Callable[[Failure], bool] = lambda failure: False,
    reports: bool = True,
    grows: bool = False,
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
        launch: how long a collective may take, what to do on a stall, and whether ranks are bound
            to cores, start cold or log more. Default: the run ends after half a minute without progress, and names the
            rank that the others wait for.
        heeds: the target heeds signals from its start, and can be started again if it was stopped
            before it could save.
        passing: returns whether `logs` will be removed after this failure, so that the report must
            not name it.
        share: this node's part, if there are several nodes.
        reports: print how the run ended; if false, the caller does (`conclude`).
        grows: ask ranks that heed signals to stop after their first checkpoint, because more workers
            shall continue. Then the outcome's `grows` is true.

    Raises:
        UsageError: workers < 1.
    """
    if workers is not None:
        whole("workers", workers)
    launch = launch or Launch()
    asked = None if share is None else share.stop
    with (
        note_signals(speaks=reports) if asked is None else nullcontext(asked) as stop,
        run_directory() as directory,
        log_directory(logs) as log_files,
    ):
        watch = Watch(directory, stop, launch, share, grows=grows)
        rank = Rank(
            rank=0,
            work=target,
            records=str(directory),
            console=console,
            logs=log_files.path,
            heeds=heeds,
            debug=launch.debug,
        )
        variables = {**(environment or {}), **timeout_for_ranks(launch.timeout)}
        cold = launch.cold or launch.debug
        try:
            outcome = _run_ranks(
                rank, watch, variables, share, workers, bind=launch.bind, cold=cold
            )
        except Stopped:
            outcome = Outcome(128 + (stop.number or 0))
            if watch.failure is not None:
                outcome = Outcome(watch.failure.code, watch.failure)
        failure = outcome.failure
        preempted = outcome.exit_code == ExitCode.PREEMPTED
        watch.look_for_checkpoints()
        outcome = replace(
            outcome,
            saved=bool(watch.marks),
            grows=watch.asked_to_grow and preempted and stop.number is None,
        )
        if failure is not None and not preempted and stop.number is None:
            failure = _with_log(failure, log_files, console, passing)
            outcome = replace(outcome, failure=failure)
        return conclude(outcome, stop, heeds=heeds) if reports else outcome


def conclude(outcome: Outcome, stop: Stop, *, heeds: bool) -> Outcome:
    """Print how a run ended, if it did not end well. Return its outcome; a run that was asked to
    stop, and did, gets the exit code for that.
    """
    failure = outcome.failure
    preempted = outcome.exit_code == ExitCode.PREEMPTED
    killed = failure is not None and failure.killed
    if stop.number is not None and (killed or preempted or outcome.exit_code == 128 + stop.number):
        if failure is not None and killed:  # while it was stopping: that causes no restart
            print_line(failures.summary(failure))
        outcome = Outcome(stop.exit_code(saved=heeds or preempted))
        print_line(f"stopped by {stop.name}; all ranks have ended")
    elif failure is not None and not preempted:
        print_line(failures.render(failure))
    return outcome


class Watch:
    """Watches ranks that were started together, and that leave their pages and records in
    `directory`.
    """

    def __init__(
        self,
        directory: Path,
        stop: Stop,
        launch: Launch,
        share: Share | None = None,
        *,
        grows: bool = False,
    ) -> None:
        """`share`: this node's part, if there are other hosts. `grows`: see `supervise`."""
        elsewhere = None if share is None else share.elsewhere
        self.directory = directory
        self.stop = stop
        self._launch = launch
        self._elsewhere = elsewhere
        self._watcher = Watcher(directory, launch.stall_after, elsewhere=elsewhere)
        self._end_watcher = EndWatcher(directory)
        self._oom_kills = processes.oom_kills()
        self.failure: Failure | None = None
        """The failure of a rank that the others waited for, once the ranks are to be ended because
        of it.
        """
        self._share = share
        self.marks: list[str] = []
        """Whether rank 0 has RESUMED or SAVED, as far as is known."""
        self._may_stop = False  # whether the ranks have saved and heed signals
        self._grows = grows
        self.asked_to_grow = False
        """Whether the ranks were asked to stop so that more workers continue."""

    def must_end(self, pids: Pids) -> Farewell | None:
        """Return how to end the living ranks now, None if they go on."""
        self.look_for_checkpoints()
        if self._grows and self._may_stop and not self.asked_to_grow:
            self.asked_to_grow = True
            asked_file(self.directory).touch()
        if self.stop.now(self.directory, pids):
            return self._farewell()
        for report in self._end_watcher.check(pids):
            print_line(report)
        stall = self._watcher.look(pids)
        if self._elsewhere is not None:
            stall = self._elsewhere.pop_stall()
        if stall is not None:
            if self._launch.on_stall == "wait" or stall.works:
                print_line("\n".join(filter(None, (stall.stack, stall.message))))
            elif stall.rank not in pids and self._elsewhere is not None:
                return None  # its own host ends the run
            else:
                self.failure = Failure(
                    rank=stall.rank,
                    kind="stall",
                    message=stall.message,
                    code=ExitCode.HANG,
                    pid=pids.get(stall.rank, 0),
                    traceback=stall.stack,
                )
                return Farewell()
        slow = self._watcher.slow(pids)
        if slow is not None:
            print_line(slow)
        return None

    def look_for_checkpoints(self) -> None:
        """Look which marks rank 0 has left since."""
        for mark in (RESUMED, SAVED):
            if mark not in self.marks and rank_file(self.directory, 0, mark).exists():
                self.marks.append(mark)
                if mark == SAVED:
                    self._may_stop = rank_file(self.directory, 0, HEEDS).exists()
                if self._share is not None:
                    self._share.on_checkpoint(self._may_stop)

    def present(self, pids: Pids) -> str:
        """Return where the ranks are, as if it were a stall; "" if they progress."""
        stall = self._watcher.present(pids)
        return "" if stall is None else stall.message

    def _farewell(self) -> Farewell:
        """Return how ranks that do not stop by themselves are ended: their own handlers have the
        launch's grace period, until a second signal.
        """
        stop = self.stop
        number = signal.SIGUSR1 if stop.number == signal.SIGUSR1 else signal.SIGTERM
        grace = self._launch.grace
        announce_at = time.monotonic() + _SILENT_SECONDS

        def hurried() -> bool:
            nonlocal announce_at
            if time.monotonic() > announce_at:
                announce_at = math.inf
                stop.announce(f"the ranks have {grace:.0f} s to end")
            return stop.at_once

        return Farewell(number, grace, hurried)

    def explained(self, failure: Failure, ranks: Iterable[int] = ()) -> Failure:
        """Add to `failure` what the rank did last, in what `ranks` differed if it was aborted, and
        whether the kernel killed processes for lack of memory.
        """
        view = view_of(self.directory, failure.rank)
        doing = ""
        if view is not None and view.step:
            doing = f"at step {view.step}, {DOING[view.phase]}"
        note = failure.note
        if failure.code == 128 + signal.SIGABRT:
            note = difference(self.directory, ranks) or note
        elif failure.code == 128 + signal.SIGKILL:
            killed = processes.oom_kills() - self._oom_kills
            if killed > 0:
                note = f"cgroup oom_kill +{killed}: the host's memory ran out"
        return replace(failure, doing=doing, note=note)


def _run_ranks(
    rank: Rank,
    watch: Watch,
    variables: Variables,
    share: Share | None,
    workers: int | None,
    *,
    bind: Bind,
    cold: bool,
) -> Outcome:
    """Run this host's ranks from their start to their end. `rank` is the work of each, except for
    its number. Raises Stopped if they were ended because of a signal or a stall.
    """

    def check_stop() -> None:
        if watch.must_end({}) is not None:
            raise Stopped

    check_stop()
    directory = watch.directory
    modules = FOR_TRAININGS if rank.work.ours else FOR_SCRIPTS
    server = fork_server(modules, {**os.environ, **variables}, cold=cold)
    server.ready(check_stop)
    if workers is None:
        workers = gpus() or 1
    called_off = (lambda: False) if share is None else share.called_off
    with (
        alone(server, workers) if share is None else nullcontext(share.ranks) as local_ranks,
        _joined_console(rank.console, local_ranks.numbers) as streams,
        Ranks(server, local_ranks) as ranks,
    ):

        def known(ended: Ended) -> Sequence[Failure]:
            return failures.of_ranks(directory, ended.codes, ended.pids)

        ranks.start(
            rank,
            lambda number: variables,
            streams=streams,
            shares=binding.shares(local_ranks.count, bind),
            cold=_sets_variables(rank.work),
        )
        ended = ranks.run(failures=known, stopping=watch.must_end, called_off=called_off)
    failed = known(ended)
    cause = failures.first(failed)
    if cause is None:
        warning = ending.warning_if_never_joined(directory, ended.pids, local_ranks.size)
        if warning:
            print_line(warning)
        return Outcome(ExitCode.OK)
    finished = [number for number, code in ended.codes.items() if code == 0]
    note = failures.advice(failed, finished)
    return Outcome(cause.code, watch.explained(replace(cause, note=note), ended.pids))


def _joined_console(
    console: Console, ranks: range
) -> AbstractContextManager[Mapping[int, Sequence[int]] | None]:
    """In the block, print the ranks' output, joined, if that is asked for and there are several
    ranks.
    """
    return nullcontext() if console != "joined" or ranks == range(1) else forwarded(ranks)


def _sets_variables(work: Program) -> bool:
    """Whether the script sets a variable that takes effect when a library starts: too late for a
    warm rank. If so, print that.
    """
    if not isinstance(work, Target) or work.script is None:
        return False
    name = set_by(Path(work.script))
    if name:
        print_line(
            "lockstep: ranks start without preloaded modules, which takes longer:"
            f" {work.script} sets {name}, which acts as torch is imported; set it in the command's"
            " environment instead"
        )
    return bool(name)


def _with_log(
    failure: Failure,
    log_files: LogDirectory,
    console: Console,
    passing: Callable[[Failure], bool],
) -> Failure:
    """Add to `failure` its rank's log file, and the end of that file if it was not on the terminal.
    A usage error needs neither.
    """
    if failure.kind == "usage":
        return failure
    log_files.keep = True
    file = rank_file(log_files.path, failure.rank, "log")
    log = "" if passing(failure) else str(file)
    hidden = console == "first" and failure.rank > 0
    return replace(failure, log=log, tail=tail(file) if hidden else "")


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


BEGINS_AGAIN = (
    "no checkpoint of this script is known yet, so it begins again; lockstep.prepare(run=DIR) and"
    " lockstep.Checkpoints save and resume"
)
_RESTARTS = 3


def restarts_of(launch: Launch, workers: Workers | None) -> int:
    """Return how often a run with these options is restarted at most."""
    if launch.max_restarts is not None:
        return launch.max_restarts
    elastic = workers is not None and workers.elastic
    return _RESTARTS if elastic or launch.on_stall == "restart" else 0


def run_with_restarts(
    start: Callable[[int], Outcome], workers: Workers, launch: Launch, *, hint: str = ""
) -> Outcome:
    """Call `start(count)` once, and again for each restart. Return the last outcome.

    Args:
        start: runs that many ranks.
        workers: how many there may be.
        launch: how often to restart, and whether after a stall.
        hint: printed at the first restart of ranks that are not known to have a checkpoint.
    """
    restarts = restarts_of(launch, workers)
    after_stalls = launch.on_stall == "restart"
    count = workers.most
    left = restarts
    saved = False
    while True:
        outcome = start(count)
        saved = saved or outcome.saved
        if outcome.grows:
            count = workers.most
            print_line(f"restart: {_counted(count)} again, from the newest checkpoint")
            continue
        failure = outcome.failure
        if failure is None or left == 0:
            return outcome
        if not failure.killed and not (after_stalls and failure.kind == "stall"):
            return outcome
        left -= 1
        count = max(workers.least, count - 1)
        origin = "from the newest checkpoint" if saved else "from the beginning"
        print_line(f"restart {restarts - left} of {restarts}: {_counted(count)}, {origin}")
        if hint and not saved:
            print_line(hint)
            hint = ""


def _counted(count: int) -> str:
    return f"{count} worker{'s' * (count > 1)}"
