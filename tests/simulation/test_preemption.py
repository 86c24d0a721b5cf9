"""Ranks that are asked to stop stop after the same step; and one that leaves as preempted has a
checkpoint of that step.
"""

from __future__ import annotations

import signal

import torch

from lockstep.checkpoints import files, folders
from lockstep.checkpoints.saver import Commit
from lockstep.errors import ExitCode, Preempted
from lockstep.runtime.failure_record import rank_file
from lockstep.runtime.preemption import HEEDS, asked_file
from tests.simulation.disk import SimulatedPath
from tests.simulation.launcher import Launcher
from tests.simulation.machine import Machine
from tests.simulation.ranks import Generation
from tests.simulation.seeds import assert_no_failure, tiers

SEEDS = 250, 3_500  # in the fast tier, and of both
DIRECTORY = SimulatedPath("/run/checkpoints")
STEPS, PATIENCE, SOON, FOREVER = 400, 6.0, 3.0, 100.0  # steps; seconds


class Job:
    """A training that may be asked to stop, and resumed."""

    def __init__(self, machine: Machine) -> None:
        self.machine, self.chance = machine, machine.random
        self.insisted = False
        """Whether it was asked more than once."""
        self.left: dict[tuple[int, int], int] = {}
        """After which step a rank has left as preempted, by restart and rank."""
        size = self.chance.randint(1, 3)
        self.hangs = self.chance.choice((None, None, None, size - 1))
        """The rank that never ends a step."""
        self.launcher = Launcher(machine, self.train, size, 1)

    def train(self, ranks: Generation, rank: int, directory: SimulatedPath) -> None:
        number = len(self.launcher.generations)
        rank_file(directory, rank, HEEDS).touch()
        ranks.heeding[rank] = True
        step = ranks.everybodys(rank, self.newest() if rank == 0 else 0)[0]
        commit = Commit(
            directory=DIRECTORY,
            rank=rank,
            guard=lambda: None,
            everybodys=lambda mine: ranks.everybodys(rank, mine),
            aside=lambda write: write(),
        )
        stop = False
        while not stop:
            step += 1
            self.machine.ensure(step < STEPS, "nobody stops")
            self.machine.sleep(0.1 if rank != self.hangs else FOREVER)
            stop = any(ranks.everybodys(rank, ranks.asked[rank]))
            if stop:
                image = torch.zeros(4, dtype=torch.uint8)
                name = "model.safetensors" if rank == 0 else f"optimizer-{rank:05d}.safetensors"
                commit(step, {name: image}, {}, lambda folder: None)
        self.left[number, rank] = step
        self.machine.sleep(self.chance.choice((0.0, 0.0, 2.0)))  # closes files
        raise Preempted(step, True)

    def newest(self) -> int:
        folders.sweep(DIRECTORY)
        found, _ = files.newest_whole(DIRECTORY)
        return 0 if found is None else found.step

    def ask(self, number: int, *, alone: bool) -> None:
        """Send a signal to the launcher, or to one rank `alone`."""
        self.machine.point("sends", number, alone)
        ranks = self.launcher.generations[-1]
        if not alone:
            self.launcher.stop.note(number, None)
        elif ranks.heeding[0]:
            ranks.asked[0] = True
            asked_file(self.launcher.directory).touch()

    def scheduler(self, *, alone: bool) -> None:
        """Asks once, and then until all is over."""
        number = self.chance.choice((signal.SIGTERM, signal.SIGUSR1))
        self.machine.sleep(self.chance.choice((0.05, 0.2, 0.5)))
        self.ask(number, alone=alone)
        self.machine.wait(lambda: self.launcher.process.over, PATIENCE)
        while not self.launcher.process.over:
            self.insisted = True
            self.ask(number, alone=False)
            self.machine.wait(lambda: self.launcher.process.over, SOON)
            self.machine.ensure(self.machine.clock < FOREVER, "it does not end when it shall")


def preemption(machine: Machine) -> None:
    chance = machine.random
    SimulatedPath("/run").mkdir()
    job = Job(machine)
    machine.kills = chance.choice((0.0, 0.0, 0.01))
    alone = chance.random() < 0.3
    scheduler = machine.start("scheduler", lambda: job.scheduler(alone=alone))
    scheduler.mortal = False
    machine.run()
    machine.quiet()
    restart, ensure = len(job.launcher.generations), machine.ensure
    last, code = job.launcher.generations[-1], job.launcher.outcome.exit_code
    left = {step for (number, _), step in job.left.items() if number == restart}
    ensure(not machine.stuck, "nobody can go on")
    ensure(len(left) < 2, f"they stopped after {left}")
    ensure(job.newest() >= max(job.left.values(), default=0), "it said saved, and is not")
    fate = any(each.by_fate for each in last.members)
    if all(last.heeding) and not fate and not job.insisted:
        ensure(not any(each.dead for each in last.members), "ended in the midst of it")
    if not fate:
        ensure(code == ExitCode.PREEMPTED, f"exit code {code}")


@tiers(*SEEDS)
def test_a_rank_that_is_preempted_has_saved(seeds: range) -> None:
    assert_no_failure(preemption, seeds)
