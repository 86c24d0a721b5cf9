"""The launcher's own code over simulated ranks: what it starts, watches, restarts and ends."""

from __future__ import annotations

import contextlib
import io
import signal
from collections.abc import Callable, Collection, Mapping

from lockstep.config.launching import Launch
from lockstep.launcher import failures
from lockstep.launcher.engine import Ended, Farewell, Ranks, Stopped, alone
from lockstep.launcher.rank import Rank, Target
from lockstep.launcher.stop import Stop
from lockstep.launcher.supervise import Outcome, Workers, conclude, run_with_restarts
from lockstep.runtime import failure_record, processes
from lockstep.runtime.failure_record import Failure
from tests.simulation.disk import SimulatedPath
from tests.simulation.machine import Machine, Process, Violation
from tests.simulation.ranks import Generation, Store

Work = Callable[[Generation, int, SimulatedPath], None]
"""Of a rank, with its number and the launcher's directory. What it raises ends it."""


_STORE = -1  # its pid


class Server:
    """In place of the fork server."""

    PORT = 29400
    """All stores get this one: what is left of an earlier one would be met."""

    def __init__(self, machine: Machine, ranks: Generation, work: Callable[[int], int]) -> None:
        self._machine, self._ranks, self._work = machine, ranks, work
        self._store: Process | None = None

    def fork(
        self,
        work: object,
        descriptors: object,
        environment: Mapping[str, str] | None = None,
        **_: object,
    ) -> int:
        if environment is None:
            return self._hold_store()
        rank = int(environment["RANK"])
        self._ranks.ports[rank] = self.PORT
        process = self._machine.start(f"rank {rank}", lambda: self._work(rank))
        self._ranks.members.append(process)
        return rank

    def _hold_store(self) -> int:
        self._store = self._machine.start("store", lambda: self._machine.wait(lambda: False))
        self._store.mortal = False
        self._machine.stores[self.PORT] = Store(self._machine, self._store)
        return _STORE

    def codes(self, pids: Collection[int]) -> dict[int, int | None]:
        return {pid: self._code(pid) for pid in pids}

    def _code(self, pid: int) -> int | None:
        process = self._ranks.members[pid]
        if process.dead:
            return -process.signal
        if not process.over:
            return None
        return process.result if isinstance(process.result, int) else 1

    def wait(self, seconds: float) -> None:
        living = [each for each in self._ranks.members if each.living]
        self._machine.wait(lambda: not all(each.living for each in living), seconds)

    def state(self, pid: int) -> str:
        return "running" if self._ranks.members[pid].living else processes.DEAD

    def groups(self, pids: object) -> dict[int, dict[int, str]]:
        return {}

    def send_signal(self, pid: int, number: int) -> None:
        if pid == _STORE:
            assert self._store is not None
            self._store.kill(number)
            return
        process = self._ranks.members[pid]
        if number == signal.SIGKILL or not self._ranks.heeding[pid]:
            process.kill(number)
        else:
            self._ranks.asked[pid] = True

    def release(self, pid: int) -> None: ...


class Launcher:
    """One, as a process of its own that is not killed."""

    def __init__(self, machine: Machine, work: Work, size: int, restarts: int) -> None:
        self.machine, self._work = machine, work
        self._size, self.restarts = size, restarts
        self.generations: list[Generation] = []
        self.stop = Stop(speaks=False)
        self.outcome = Outcome(0)
        self.process = machine.start("launcher", self._run)
        self.process.mortal = False

    @property
    def directory(self) -> SimulatedPath:
        return SimulatedPath(f"/records-{len(self.generations)}")

    def _run(self) -> None:
        workers = Workers(1, self._size)
        launch = Launch(max_restarts=self.restarts)
        with contextlib.redirect_stderr(io.StringIO()) as said:
            self.outcome = run_with_restarts(self._start, workers, launch)
        self.machine.note(said.getvalue().strip())

    def _start(self, count: int) -> Outcome:
        machine, ranks = self.machine, Generation(self.machine, count)
        self.allowed()
        self.generations.append(ranks)
        directory = self.directory
        directory.mkdir()
        server = Server(machine, ranks, lambda rank: self._rank(ranks, rank, directory))
        self.stop = stop = Stop(speaks=False, kill=server.send_signal)

        def known(now: Ended) -> list[Failure]:
            return failures.of_ranks(directory, now.codes, now.pids)

        with (
            alone(server, count) as place,  # type: ignore[arg-type]
            Ranks(server, place, machine.monotonic) as running,  # type: ignore[arg-type]
        ):
            try:
                running.start(
                    Rank(rank=0, work=Target(module="lockstep.program"), records=""),
                    lambda number: {},
                )
                ended = running.run(
                    failures=known,
                    stopping=lambda living: Farewell() if stop.now(directory, living) else None,
                )
                cause = failures.first(known(ended))
                outcome = Outcome(0) if cause is None else Outcome(cause.code, cause)
            except Stopped:
                outcome = Outcome(128 + (stop.number or 0))
        machine.ensure(
            not any(each.living for each in ranks.members), "a rank has outlived its generation"
        )
        return conclude(outcome, stop, heeds=True)

    def allowed(self) -> None:
        """Raise Violation where no further generation may start."""
        ensure = self.machine.ensure
        ensure(len(self.generations) <= self.restarts, "one restart too many")
        if self.generations:
            last = self.generations[-1].members
            ensure(any(each.by_fate for each in last), "a restart though nobody was killed")
            ensure(self.stop.number is None, "a restart after a request to stop")

    def _rank(self, ranks: Generation, rank: int, directory: SimulatedPath) -> int:
        """Its exit code."""
        try:
            self._work(ranks, rank, directory)
        except Violation:
            raise
        except (Exception, SystemExit) as error:
            return self._leave(error, rank, directory)
        return 0

    def _leave(self, error: BaseException, rank: int, directory: SimulatedPath) -> int:
        self.machine.note(f"leaves with {error!r}")
        failure = failure_record.of_exception(error, rank, may_exit=False)
        failure_record.write(failure, directory)
        return failure.code
