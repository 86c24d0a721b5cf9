"""Start ranks, watch them, stop them, and say in the end what went wrong: the engine of
`lockstep run` and `lockstep train`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.config.knob import whole
from lockstep.errors import ExitCode
from lockstep.launcher import ending, failures, interpreter
from lockstep.launcher.asked import SPARE, mark
from lockstep.launcher.engine import Ended, LocalRanks, Ranks, Stopped, store
from lockstep.launcher.failures import Failure, signal_name
from lockstep.launcher.forward import forwarded
from lockstep.launcher.logs import Console, LogPlace, log_of, log_place, tail
from lockstep.launcher.rank import Program, Rank, Target
from lockstep.launcher.seat import Seat
from lockstep.launcher.server import FOR_SCRIPTS, FOR_TRAININGS, Server, gpus, server
from lockstep.launcher.stopping import Stop, noted
from lockstep.launcher.successor import Imports
from lockstep.launcher.watch import Stalls, Watch
from lockstep.runtime import status
from lockstep.runtime.private import run_directory

if TYPE_CHECKING:
    from lockstep.launcher.ray.stalled import Asked


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended. `exit_code`: 0, the first failing rank's own, 75 when it was stopped and
    saved, or 128 + n when signal n stopped it.
    """

    exit_code: int
    failure: Failure | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """This node's part of a run on several."""

    ranks: LocalRanks
    called_off: Callable[[], bool] = lambda: False
    """Whether its ranks shall end, because the run has ended elsewhere."""
    elsewhere: Asked | None = None
    """What the other nodes know of their ranks, to find the rank that a stalled run waits for."""


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
    cold: bool = False,
    again: bool = False,
    passing: Callable[[Failure], bool] = lambda failure: False,
    reports: bool = True,
) -> Outcome:
    """Run `target` on `workers` ranks of this host and wait for all of them. None: as many as there
    are GPUs, else one.

    When a rank fails the others are stopped within two seconds, and its failure is printed to
    stderr as the last thing. SIGINT, SIGTERM, SIGHUP, SIGUSR1 and SIGQUIT stop everything and leave
    one line; ranks that heed signals (`World.heed_signals`) are let take their step, save and leave
    first, until a second signal comes. Nothing is left running, whichever way this process ends.

    Args:
        logs: an existing directory; each rank's output goes to rank-N.log there. Without, a
            temporary one, which is kept if a rank fails.
        console: which ranks may write to the terminal. The others' output goes to their log only.
        environment: variables for the ranks, over this process's own.
        stalls: what is done where the ranks do not get on; default: the run ends after half a
            minute, naming who is waited for.
        heeds: the target heeds signals from its first moment on, and can be begun anew where it was
            stopped before it has come to that.
        debug: have libraries say in the logs what they do, and add a line for every collective.
        again: the ranks may be started again after a kill; what they import is warm then.
        passing: whether `logs` will be removed after this failure, and so is not named with it.
        share: this node's part where there are several.
        reports: print how the run ended; without, the caller does (`conclude`).
        cold: start a fresh interpreter for each rank, where otherwise all are forked from one that
            has imported torch.

    Raises:
        UsageError: workers < 1.
    """
    if workers is not None:
        whole("workers", workers)
    with noted(speaks=reports) as stop, run_directory() as directory, log_place(logs) as place:
        watch = Watch(
            directory, stop, stalls or Stalls(), share.elsewhere if share is not None else None
        )
        rank = Rank(
            rank=0,
            work=target,
            records=str(directory),
            console=console,
            logs=str(place.path),
            heeds=heeds,
            debug=debug,
        )
        generation = _Generation(
            rank, watch, environment or {}, share, cold=cold or debug, again=again
        )
        try:
            outcome = generation.run(workers)
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
    """Print how a run ended that did not end well; with the exit code of one that was asked to
    stop, and did.
    """
    killed = outcome.failure if outcome.failure is not None and outcome.failure.killed else None
    if stop.number is not None and (
        killed is not None or outcome.exit_code in (ExitCode.PREEMPTED, 128 + stop.number)
    ):
        if killed is not None:  # while it was to stop: nothing is begun anew for that
            print(failures.summary(killed), file=sys.stderr)
        outcome = Outcome(stop.exit_code(saved=heeds or outcome.exit_code == ExitCode.PREEMPTED))
        print(f"stopped by {stop.name}; all ranks have ended", file=sys.stderr)
    elif outcome.failure is not None and outcome.exit_code != ExitCode.PREEMPTED:
        print(failures.render(outcome.failure), file=sys.stderr)
    return outcome


class _Generation:
    """This host's ranks from their start to their end."""

    def __init__(
        self,
        rank: Rank,
        watch: Watch,
        environment: Mapping[str, str],
        share: Share | None,
        *,
        cold: bool,
        again: bool,
    ) -> None:
        self._rank = rank
        self._watch = watch
        self._directory = watch.directory
        self._share = share
        self._cold = cold
        self._environment = environment
        self._to_warm = again and not cold  # what ranks import, once they train
        self._spared: set[int] = set()

    def run(self, workers: int | None) -> Outcome:
        """Raises Stopped where the ranks were ended because they were asked to stop, or hung."""
        self._heed()
        forking = server(
            FOR_TRAININGS if self._rank.work.ours else FOR_SCRIPTS,
            {**os.environ, **self._environment},
            cold=self._cold,
        )
        forking.ready(self._heed)
        count = gpus() or 1 if workers is None else workers
        with (
            self._place(forking, count) as place,
            self._console(place.numbers) as pipes,
            Ranks(forking.newest(), place) as ranks,
        ):

            def seat(number: int, variables: Mapping[str, str]) -> Seat:
                work = replace(self._rank, rank=number, pipes=pipes)
                own = {**variables, **self._environment, failures.DIRECTORY: str(self._directory)}
                return Seat(work=work, environment={**os.environ, **own})

            def stopping(living: Mapping[int, int]) -> bool:
                self._warm(forking, place)
                return self._watch.must_end(living)

            called_off = (lambda: False) if self._share is None else self._share.called_off
            ranks.start(
                seat,
                cold=self._cold or _sets_variables(self._rank.work),
                beside=self._rank.work.beside(),
            )
            ended = ranks.run(
                explained=self._known,
                stopping=stopping,
                spared=self._do_without,
                called_off=called_off,
            )
        return self._outcome(ended, place.size)

    def _heed(self) -> None:
        if self._watch.must_end({}):
            raise Stopped

    @contextmanager
    def _place(self, forking: Server, count: int) -> Iterator[LocalRanks]:
        """With the store that the ranks meet through: this host's own, or that of the first of
        several.
        """
        if self._share is not None:
            yield self._share.ranks
            return
        with store(forking) as (address, port):
            yield LocalRanks(count=count, size=count, address=address, port=port)

    @contextmanager
    def _console(self, ranks: range) -> Iterator[str | None]:
        """Print what ranks say, joined, where that is asked for and there are several; gives
        where they find the pipes for it.
        """
        if self._rank.console != "joined" or ranks == range(1):
            yield None
            return
        with forwarded(self._directory, ranks):
            yield str(self._directory)

    def _warm(self, forking: Server, place: LocalRanks) -> None:
        """Where ranks may be started again: have the server warm up what they have imported,
        once they train.
        """
        if not self._to_warm:
            return
        view = status.read(status.file_of(self._directory, place.first_rank))
        if (
            view is not None
            and view.step > 1
            and (imports := Imports.read(self._directory)) is not None
        ):
            self._to_warm = False
            forking.prepare_successor(imports, [*place.variables(0)])

    def _do_without(self, now: Ended) -> set[int]:
        """The ranks that were killed, and that the rest go on without. Each is said once."""
        for rank, code in now.codes.items():
            if (
                rank not in self._spared
                and code is not None
                and code < 0
                and mark(self._directory, rank, SPARE).exists()
            ):
                self._spared.add(rank)
                how = f"was killed by {signal_name(-code)}: the rest go on without it"
                print(f"rank {rank} (pid {now.pids[rank]}) {how}", file=sys.stderr, flush=True)
        return self._spared

    def _known(self, now: Ended) -> bool:
        """Whether what ranks have left by now tells the cause."""
        self._do_without(now)
        cause = failures.first(self._failures(now))
        if cause is not None and cause.code == ExitCode.PREEMPTED:
            return None not in now.codes.values()  # the others are leaving too
        return cause is not None and cause.standing == "cause"

    def _failures(self, ended: Ended) -> Sequence[Failure]:
        """Less those of ranks that could be done without; unless what the others say is that
        they could not.
        """
        found = failures.of_ranks(self._directory, ended.codes, ended.pids)
        others = [failure for failure in found if failure.rank not in self._spared]
        cause = failures.first(others)
        return others if cause is None or cause.standing == "cause" else found

    def _outcome(self, ended: Ended, size: int) -> Outcome:
        found = self._failures(ended)
        cause = failures.first(found)
        if cause is None:
            if text := ending.of_strangers(self._directory, ended.pids, size):
                print(text, file=sys.stderr, flush=True)
            return Outcome(ExitCode.OK)
        note = failures.finished_early(
            found, [rank for rank, code in ended.codes.items() if code == 0]
        )
        return Outcome(cause.code, self._watch.explained(replace(cause, note=note)))


def _sets_variables(work: Program) -> bool:
    """Whether the script sets a variable that acts as a library starts, which it has in a warm
    rank. That is said.
    """
    script = work.script if isinstance(work, Target) else None
    name = "" if script is None else interpreter.set_by(Path(script))
    if name:
        what = f"{script} sets {name}, which acts as torch is imported"
        print(
            f"lockstep: ranks are started cold, which takes longer: {what}; set it for the command"
            " instead",
            file=sys.stderr,
            flush=True,
        )
    return bool(name)


def _with_log(
    failure: Failure, place: LogPlace, console: Console, passing: Callable[[Failure], bool]
) -> Failure:
    """With its rank's log file, and the end of it where that was not on the terminal. A usage
    error needs neither.
    """
    if failure.kind == "usage":
        return failure
    file = log_of(place.path, failure.rank)
    place.keep = True
    log = "" if passing(failure) else str(file)
    return replace(
        failure, log=log, tail=tail(file) if console == "first" and failure.rank > 0 else ""
    )
