"""Ranks that meet are of one generation, all of them are there, and where one is missing all hear
the same; whoever is late or killed. They are restarted after a kill, so often as it was allowed, and
for no other reason.
"""

from __future__ import annotations

from datetime import timedelta

import pytest

from lockstep.collectives import store_barrier
from lockstep.errors import BarrierTimeout, ExitCode
from tests.simulation.disk import SimulatedPath
from tests.simulation.launcher import Launcher
from tests.simulation.machine import Machine
from tests.simulation.ranks import Generation, Store
from tests.simulation.seeds import assert_found, assert_no_failure, tiers

SEEDS = 800, 16_000  # in the fast tier, and of both
WITHIN = 1000  # seeds a planted bug is found
TIMEOUT = timedelta(seconds=1)


class Meetings:
    """Who has come to which barrier of a generation, and what they were told there."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.came: dict[tuple[Generation, str], set[int]] = {}
        self.told: dict[tuple[Generation, str], tuple[int, ...]] = {}

    def train(self, ranks: Generation, rank: int, directory: SimulatedPath) -> None:
        machine, chance = self.machine, self.machine.random
        store = machine.stores[ranks.ports[rank]]
        store.callers.add(ranks)
        machine.ensure(len(store.callers) == 1, "two generations in one store")
        for number in range(2):
            machine.sleep(chance.choice((0.0, 0.0, 0.1, 0.99, 1.5)))
            self.meet(store, ranks, rank, f"barrier/{number}")

    def meet(self, store: Store, ranks: Generation, rank: int, name: str) -> None:
        barrier = ranks, name
        self.came.setdefault(barrier, set()).add(rank)
        try:
            store_barrier.wait(store, name, rank, ranks.size, TIMEOUT, clock=self.machine)  # type: ignore[arg-type]
        except BarrierTimeout as error:
            self._compare(barrier, tuple(error.values["missing"]))
            raise
        self.machine.ensure(len(self.came[barrier]) == ranks.size, "it did not wait for all")
        self._compare(barrier, ())

    def _compare(self, barrier: tuple[Generation, str], missing: tuple[int, ...]) -> None:
        before = self.told.setdefault(barrier, missing)
        self.machine.ensure(before == missing, f"one heard {before}, another {missing}")


def rendezvous(machine: Machine) -> None:
    chance = machine.random
    machine.kills = chance.choice((0.0, 0.01, 0.03))
    meetings = Meetings(machine)
    launcher = Launcher(machine, meetings.train, chance.randint(1, 3), chance.randint(0, 3))
    machine.run()
    last, ensure, code = launcher.generations[-1], machine.ensure, launcher.outcome.exit_code
    late = any(meetings.told.values())
    killed = any(each.by_fate for each in last.members)
    done = all(each.over and each.result == 0 for each in last.members)
    ensure(not machine.stuck, "nobody can go on")
    ensure(done == (code == 0), f"exit code {code}")
    ensure(done or late or killed, "it failed without a cause")
    if code == 128 + 9:
        ensure(killed, "nobody was killed")
        ensure(len(launcher.generations) == launcher.restarts + 1, "a restart was left")
    elif not done:
        ensure(code == ExitCode.FAILED, f"exit code {code}")


@tiers(*SEEDS)
def test_ranks_meet_their_own_generation_or_hear_who_is_missing(seeds: range) -> None:
    assert_no_failure(rendezvous, seeds)


def test_it_finds_an_outcome_that_each_rank_decides_for_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def careless(store: Store, key: str, expected: str, value: str) -> bytes:
        store.set(key, value)
        return value.encode()

    monkeypatch.setattr(Store, "compare_set", careless)
    assert_found(rendezvous, WITHIN, "another")
