"""Processes and a clock, of which a seed decides who goes on next, and who is killed.

A process is a function on a thread of its own, of which one runs at a time: at every operation
(`point`) the seed may hand over to another. What is killed runs no further than that: its next
operation raises Killed, and so do all that its `finally` blocks try.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from tests.simulation.ranks import Store


class Killed(BaseException):
    """This process is no more."""


class Violation(Exception):
    """An invariant does not hold."""


class Process:
    """A simulated one. `machine.running` is the one whose code runs now."""

    def __init__(self, machine: Machine, name: str, run: Callable[[], object]) -> None:
        self.machine, self.name, self._run = machine, name, run
        self.dead = self.over = False
        self.until: Callable[[], bool] | None = None
        """What it waits for."""
        self.deadline = float("inf")
        self.result: object = None
        self.started = False
        self.signal = 0
        """That has killed it."""
        self.by_fate = False
        """Whether it was the machine that killed it, and not another process."""
        self.mortal = True
        """Whether the machine may kill it."""
        self.thread: _Thread | None = None

    def kill(self, signal: int = 9, *, by_fate: bool = False) -> None:
        if not (self.over or self.dead):
            self.machine.note(f"{self.name} is killed by signal {signal}")
            self.dead, self.signal, self.by_fate = True, signal, by_fate
            self.machine.disk.release(self)

    def fall(self) -> None:
        if self.mortal:
            self.kill(by_fate=True)

    @property
    def living(self) -> bool:
        return not (self.dead or self.over)

    @property
    def ready(self) -> bool:
        return self.dead or self.until is None or self.until()

    def work(self) -> None:
        """On its thread."""
        try:
            if not self.dead:
                self.result = self._run()
        except Killed:
            pass
        except BaseException as error:
            self.machine.errors.append(error)
        self.machine.disk.release(self)
        self.over = True


class _Thread:
    """Carries one process after the other: a new thread costs more than most simulations."""

    idle: ClassVar[list[_Thread]] = []

    def __init__(self) -> None:
        self.go = threading.Lock()
        self.go.acquire()
        self.process: Process | None = None
        self._thread = threading.Thread(target=self._carry, name="simulated", daemon=True)
        self._thread.start()

    def _carry(self) -> None:
        while True:
            self.go.acquire()
            if self.process is None:
                return
            process, self.process = self.process, None
            process.work()
            self.idle.append(self)
            process.machine.hand_over()

    @classmethod
    def end_all(cls) -> None:
        while cls.idle:
            thread = cls.idle.pop()
            thread.go.release()
            thread._thread.join()


class Machine:
    """One simulation, until `run` returns."""

    now: Machine  # the one that runs in this (real) process

    def __init__(self, seed: int) -> None:
        from tests.simulation.disk import Disk

        Machine.now = self
        self.seed = seed
        self.random = random.Random(seed)
        self.clock = 0.0
        self.trace: list[tuple[object, ...]] = []
        self.processes: list[Process] = []
        self.running: Process | None = None
        self.errors: list[BaseException] = []
        self.kills = self.failures = 0.0
        """The chance that an operation is the last of its process, and that it fails."""
        self.power = 0.0
        """The chance that an operation is the last of all."""
        self.haste = self.random.choice((0.02, 0.1, 0.5))  # how often another goes on
        self.disk = Disk(self)
        self.stuck = False
        """Whether processes waited for what did not come."""
        self.stores: dict[int, Store] = {}
        """That listen, by port."""
        self._main = threading.Lock()
        self._main.acquire()

    # -- what a scenario does ---------------------------------------------------------------------

    def start(self, name: str, run: Callable[[], object]) -> Process:
        process = Process(self, name, run)
        self.processes.append(process)
        return process

    def run(self) -> None:
        """Until all processes have ended. The first error that one has raised is raised here."""
        self.hand_over()
        self._main.acquire()
        self.processes = []
        for error in self.errors:
            raise error

    def quiet(self) -> None:
        """From now on nothing fails any more."""
        self.kills = self.failures = self.power = 0.0

    def note(self, *what: object) -> None:
        self.trace.append((self.running.name if self.running else "-", *what))

    # -- what a process does ----------------------------------------------------------------------

    def point(self, *what: object) -> None:
        """Before every operation: others may go on first, or this process may end."""
        me = self.running
        if me is None:  # the scenario itself looks at what is left
            return
        if me.dead:
            raise Killed
        if self.random.random() < self.haste:
            self.clock += 0.05
            self.hand_over(me)
        if self.kills and self.random.random() < self.kills:
            self.random.choice(self.processes).fall()
        if self.power and self.random.random() < self.power:
            self.note("the power fails")
            for each in self.processes:
                each.kill(by_fate=True)
            self.disk.lose_power()
        if me.dead:
            raise Killed
        self.trace.append((me.name, *what))

    def fails(self) -> bool:
        """Whether the disk refuses this operation."""
        return self.failures > 0 and self.random.random() < self.failures

    def wait(self, until: Callable[[], bool], seconds: float = float("inf")) -> bool:
        """Whether it has come true in time."""
        me = self.running
        assert me is not None
        me.until, me.deadline = until, self.clock + seconds
        self.hand_over(me)
        me.until, me.deadline = None, float("inf")
        if me.dead:
            raise Killed
        return until()

    def sleep(self, seconds: float) -> None:
        self.point("sleep", seconds)
        self.wait(lambda: False, seconds)

    def monotonic(self) -> float:
        return self.clock

    def hand_over(self, me: Process | None = None) -> None:
        """Have another process go on, and `me` later."""
        following = self._next()
        if following is me and me is not None:
            return
        self.running = following
        if following is None:
            self._main.release()
            return
        if not following.started:
            following.started = True
            following.thread = _Thread.idle.pop() if _Thread.idle else _Thread()
            following.thread.process = following
        thread, mine = following.thread, me.thread if me else None
        assert thread is not None
        thread.go.release()
        if mine is not None:
            mine.go.acquire()

    def _next(self) -> Process | None:
        living = [each for each in self.processes if not each.over]
        if not living:
            return None
        ready = [each for each in living if each.ready or each.deadline <= self.clock]
        if not ready:
            soonest = min(each.deadline for each in living)
            if soonest == float("inf"):
                self.note("nobody can go on:", *(each.name for each in living))
                for each in living:
                    each.kill()
                ready = living
                self.stuck = True
            else:
                self.clock = soonest
                ready = [each for each in living if each.deadline <= soonest]
        return self.random.choice(ready)

    def ensure(self, holds: Any, what: str) -> None:
        if not holds:
            raise Violation(what)


@contextmanager
def threads() -> Iterator[None]:
    """Those that carry simulated processes end with the block."""
    try:
        yield
    finally:
        _Thread.end_all()
