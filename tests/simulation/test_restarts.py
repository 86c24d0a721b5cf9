"""Ranks are restarted after a kill, so often as it was allowed, and for no other reason."""

from __future__ import annotations

from lockstep.errors import ExitCode
from tests.simulation.disk import SimulatedPath
from tests.simulation.launcher import Launcher
from tests.simulation.machine import Machine
from tests.simulation.ranks import Generation
from tests.simulation.seeds import assert_no_failure, tiers

SEEDS = 1_200, 20_000  # in the fast tier, and of both


class Mistake(Exception):
    """Of the user's program."""


def restarts(machine: Machine) -> None:
    chance = machine.random
    machine.kills = chance.choice((0.0, 0.01, 0.03))
    mistakes = chance.choice((0.0, 0.0, 0.05))
    made: list[Generation] = []

    def work(ranks: Generation, rank: int, directory: SimulatedPath) -> None:
        for step in range(4):
            machine.point("step", step)
            if chance.random() < mistakes:
                made.append(ranks)
                raise Mistake(f"at step {step}")
            ranks.everybodys(rank, step)

    launcher = Launcher(machine, work, chance.randint(1, 3), chance.randint(0, 3))
    machine.run()
    last, ensure, outcome = launcher.generations[-1], machine.ensure, launcher.outcome
    ensure(not machine.stuck, "nobody can go on")
    killed = [each for each in last.members if each.by_fate]
    done = all(each.over and each.result == 0 for each in last.members)
    ensure(done == (outcome.exit_code == 0), f"exit code {outcome.exit_code}")
    if outcome.exit_code == 128 + 9:
        ensure(killed, "nobody was killed")
        ensure(len(launcher.generations) == launcher.restarts + 1, "a restart was left")
    elif outcome.exit_code == ExitCode.FAILED:
        ensure(last in made, "nobody had made a mistake")
    else:
        ensure(done, f"exit code {outcome.exit_code}")


@tiers(*SEEDS)
def test_ranks_are_restarted_after_a_kill_only(seeds: range) -> None:
    assert_no_failure(restarts, seeds)
