"""What resume chooses is whole, of one step, and never older than the newest that was told to be
saved; whenever ranks are killed, the power fails, or the disk refuses.
"""

from __future__ import annotations

import pytest
import torch

from lockstep.checkpoints import files, folders, pieces
from lockstep.checkpoints.saver import Commit
from lockstep.config.retention import Retention
from lockstep.errors import LockstepError
from lockstep.training.run_directory import RunDirectory
from tests.simulation.disk import SimulatedPath
from tests.simulation.machine import Machine
from tests.simulation.ranks import Generation
from tests.simulation.seeds import assert_found, assert_no_failure, tiers

SEEDS = 400, 8_000  # in the fast tier, and of both
WITHIN = 2000  # seeds a planted bug is found
RUN = SimulatedPath("/run")
DIRECTORY = RUN / "checkpoints"


class Training:
    """Generations of ranks that resume and save; and what they have been told."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.told = 0
        """The newest step of which a rank has heard that it is saved."""
        self.retention = Retention.of(machine.random.randint(1, 2))
        self.life = 0
        self.steps: tuple[int, ...] = ()
        """From one save to the next."""

    def live(self, size: int) -> None:
        """One generation, until all have ended or one has died."""
        self.life += 1
        self.steps = self.machine.random.choice(((10,), (10, 10), (10, 0)))  # 0: the same again
        ranks = Generation(self.machine, size)
        ranks.members = [
            self.machine.start(f"rank {rank}", lambda rank=rank: self._end(ranks, rank))
            for rank in range(size)
        ]
        self.machine.run()

    def choose(self) -> int:
        """As Checkpoints.resume does."""
        folders.sweep(DIRECTORY)
        found, _ = files.newest_whole(DIRECTORY)
        step = 0 if found is None else found.step
        self.machine.ensure(step >= self.told, f"{self.told} was told, and {step} is resumed")
        if found is not None:
            stamps = {
                (found.folder / entry.name).read_bytes().partition(b";")[0]
                for entry in found.entries
                if entry.name != "state.json"
            } | {f"{step} in {found.state['life']}".encode()}
            self.machine.ensure(len(stamps) == 1, f"mixed: {stamps}")
        return step

    def _end(self, ranks: Generation, rank: int) -> None:
        try:
            self._rank(ranks, rank)
        except (LockstepError, OSError) as error:
            self.machine.note(f"ends: {error}")

    def _rank(self, ranks: Generation, rank: int) -> None:
        step = ranks.everybodys(rank, self.choose() if rank == 0 else None)[0]
        commit = Commit(
            directory=DIRECTORY,
            rank=rank,
            guard=lambda: None,
            everybodys=lambda mine: ranks.everybodys(rank, mine),
            aside=lambda write: write(),
        )
        for more in self.steps:
            step += more
            self._save(commit, step, rank)

    def _save(self, commit: Commit, step: int, rank: int) -> None:
        octets = bytearray(f"{step} in {self.life};{'x' * (20 + rank)}", "ascii")
        names = [f"optimizer-{rank:05d}.safetensors", *(["model.safetensors"] if rank == 0 else [])]
        images = {name: torch.frombuffer(octets, dtype=torch.uint8) for name in names}

        def done(folder: SimulatedPath) -> None:
            if step % 20 == 0:
                files.mark_best(folder, "loss", 1.0)
            folders.tidy(folder, self.retention, None, files.best(DIRECTORY))

        commit(step, images, {"life": self.life}, done)
        self.told = max(self.told, step)


def checkpoints(machine: Machine) -> None:
    chance = machine.random
    RunDirectory.claim(RUN, "x")
    training = Training(machine)
    for _ in range(chance.randint(1, 3)):
        machine.kills = chance.choice((0.0, 0.005, 0.02))
        machine.power = chance.choice((0.0, 0.005, 0.02))
        machine.failures = chance.choice((0.0, 0.0, 0.02))
        training.live(chance.randint(1, 3))
    machine.quiet()
    training.choose()
    left = [path.name for path in DIRECTORY.iterdir()] if DIRECTORY.exists() else []
    machine.ensure(not any("unfinished" in name for name in left), f"left behind: {left}")


@tiers(*SEEDS)
def test_what_is_resumed_is_whole_and_the_newest(seeds: range) -> None:
    assert_no_failure(checkpoints, seeds)


def test_it_finds_names_on_disk_before_their_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "force", lambda file: None)
    assert_found(checkpoints, WITHIN, "was told")
