"""A run directory has one owner, and what an owner has written stays; whoever else claims it,
releases it, moves it away or is killed meanwhile.
"""

from __future__ import annotations

import pytest

from lockstep.errors import LockstepError, UsageError
from lockstep.runtime import disk
from lockstep.training.run_directory import RunDirectory
from tests.simulation.disk import SimulatedPath, Stream
from tests.simulation.machine import Machine, Process
from tests.simulation.seeds import assert_found, assert_no_failure, tiers

SEEDS = 800, 16_000  # in the fast tier, and of both
WITHIN = 2000  # seeds a planted bug is found
RUN = SimulatedPath("/runs/x")


class Launchers:
    """Several that want the same directory."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.owners: list[Process] = []
        """Launchers that have the claim."""
        self.moved = False
        """Whether somebody has moved the directory away."""

    def launch(self, number: int) -> None:
        machine, chance = self.machine, self.machine.random
        fresh = chance.random() < 0.2
        try:
            claim = RunDirectory.claim(RUN, "x", fresh=fresh)
        except UsageError as error:
            machine.note("refused:", error.code)
            if error.code == "run-directory-not-writable":
                machine.ensure(self.moved or machine.failures, f"refused: {error}")
            return
        me = machine.running
        assert me is not None
        machine.note("owns it")
        others = [each for each in self.owners if not (each.dead or each.over)]
        self.owners = [*others, me]
        machine.ensure(not others or self.moved, f"{me.name} and {others} own it")
        failed = True
        try:
            failed = self._train(claim, number)
        except (LockstepError, OSError) as error:
            machine.ensure(self.moved, f"somebody has been at it: {error}")
        self.owners = [each for each in self.owners if each is not me]
        claim.release(failed=failed)

    def _train(self, claim: RunDirectory, number: int) -> bool:
        """Whether it fails before its first step."""
        machine, chance = self.machine, self.machine.random
        settings = claim.path / "settings.json"
        settings.write_text(str(number))
        if chance.random() < 0.3:
            return True
        for step in range(chance.randint(0, 2)):
            claim.check()
            if not self.moved:
                found = settings.read_text()
                mine = found == str(number) or self.moved  # by now
                machine.ensure(mine, f"settings of {found}, not of {number}")
            claim.metrics.write_text(f'"kind": "step" {step}')
        if chance.random() < 0.2 and not self.moved:
            claim.result.write_text("{}")
        return False

    def meddle(self) -> None:
        self.machine.sleep(1.0)
        self.moved = True
        try:
            RUN.rename(SimulatedPath("/runs/elsewhere"))
        except FileNotFoundError:
            self.moved = False


def claims(machine: Machine) -> None:
    chance = machine.random
    if chance.random() < 0.5:
        SimulatedPath("/runs").mkdir()
    launchers = Launchers(machine)
    for life in range(2):
        machine.kills = chance.choice((0.0, 0.01))
        for number in range(2 if chance.random() < 0.7 else 3):
            machine.start(f"launcher {number}", lambda n=10 * life + number: launchers.launch(n))
        if life and chance.random() < 0.3:
            machine.start("somebody", launchers.meddle)
        machine.run()
        launchers.owners.clear()
    machine.quiet()
    if launchers.moved:
        return
    try:  # nobody owns it now
        RunDirectory.claim(RUN, "x").release()
    except UsageError as error:
        machine.ensure(error.code == "run-finished", f"nobody owns it, and yet: {error}")


@tiers(*SEEDS)
def test_a_run_directory_has_one_owner(seeds: range) -> None:
    assert_no_failure(claims, seeds)


def test_it_finds_a_claim_that_looks_and_then_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    def careless(stream: Stream) -> None:
        if stream.file.owner is not None:
            raise BlockingIOError
        stream.path.machine.point("claims", stream.path)
        stream.file.owner = stream.process

    monkeypatch.setattr(disk, "lock", careless)
    assert_found(claims, WITHIN, "own it")
