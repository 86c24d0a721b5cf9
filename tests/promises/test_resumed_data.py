"""Promise 4, its data: ranks killed with SIGKILL at random steps, again and again, and resumed each
time with another number of them.

Every rank writes down what it was given in each step, and rank 0 keeps `Loader.state_dict()` after
it. Put together, each step as it was run last, that is what an undisturbed run on one rank was
given: the same samples, cut alike, with the same augmentation.
"""

from __future__ import annotations

import json
import os
import random
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.data import RandomSampler

import lockstep
from lockstep.data.loader import Loader
from lockstep.errors import WorkerFailed
from lockstep.testing import run_ranks
from tests.data.datasets import Augmented
from tests.data.test_loader import as_data

SAMPLES, EPOCHS = 197, 3  # of 13 steps, the last of 5 samples
MOMENTS = ("before the barrier", "after the barrier", "after the state was kept")


class Heaps:
    """An order that makes micro-batches of 1, 2, 3, 4, 1 ... samples, another number of them in
    every epoch.
    """

    def __init__(self) -> None:
        self.fewer = 0

    def count(self, epoch: int) -> int:
        return 40 + 5 * epoch

    def batch(self, epoch: int, number: int) -> Any:
        return (np.arange(number % 4 + 1, dtype=np.int64) * 40 + 7 * number + epoch) % SAMPLES

    def fingerprint(self) -> str:
        return "heaps"


def loader(kind: str, rank: int, size: int, workers: int) -> Loader:
    sizes: dict[str, Any] = {"global_batch": 16, "micro_batch": 3}
    if kind == "sampler":
        sizes["order"] = RandomSampler(range(SAMPLES))
    if kind == "batches":
        sizes = {"order": Heaps(), "micro_batches": 4}
    return Loader(
        Augmented(SAMPLES), **sizes, seed=5, rank=rank, size=size, num_workers=workers, device="cpu"
    )


def steps(ours: Loader) -> Iterator[tuple[int, int, dict[int, Any]]]:
    """(step, epoch, this rank's micro-batches by slot)."""
    for epoch in ours.epochs(EPOCHS):
        for window in epoch:
            yield (
                window.step,
                epoch.number,
                {slot: as_data(batch) for slot, batch in zip(window.slots, window, strict=True)},
            )


def train(
    world: lockstep.World,
    directory: Path,
    kind: str,
    generation: int,
    workers: int,
    kill: tuple[int, int, str] | None,
) -> None:
    """`kill`: which rank dies, at which step, and when in it."""
    state = directory / "state.json"
    ours = loader(kind, world.rank, world.size, workers)
    if state.exists():
        ours.load_state_dict(json.loads(state.read_text()))
    with (directory / f"{generation}-{world.rank}.jsonl").open("w") as file:
        for step, epoch, batches in steps(ours):
            file.write(json.dumps([step, epoch, batches]) + "\n")
            file.flush()
            for moment in MOMENTS:
                if kill == (world.rank, step, moment):
                    os.kill(os.getpid(), signal.SIGKILL)
                if moment == "before the barrier":
                    world.barrier()
                if moment == "after the barrier" and world.rank == 0:
                    part = state.with_suffix(".part")
                    part.write_text(json.dumps(ours.state_dict()))
                    part.rename(state)


def as_last_run(directory: Path, generations: int) -> dict[int, dict[int, Any]]:
    """Step -> slot -> batch, each step from the last generation in which it was run."""
    found: dict[int, dict[int, Any]] = {}
    for generation in range(generations):
        lines = [
            json.loads(line)
            for file in directory.glob(f"{generation}-*.jsonl")
            for line in file.read_text().splitlines()
        ]
        for step in {line[0] for line in lines}:
            found[step] = {}
        for step, epoch, batches in lines:
            assert not found[step].keys() & batches.keys(), "two ranks were given the same slot"
            found[step] |= {int(slot): (epoch, batch) for slot, batch in batches.items()}
    return found


def killed_again_and_again(directory: Path, kind: str, kills: int) -> dict[int, dict[int, Any]]:
    choice = random.Random(7)
    last = max(step for step, _, _ in steps(loader(kind, 0, 1, 0)))
    worlds = Counter()
    for generation in range(kills):
        state = directory / "state.json"
        step = json.loads(state.read_text())["step"] if state.exists() else 0
        # seldom: in these ranks a loader worker imports torch anew
        size, workers = choice.randint(1, 4), int(generation % 8 == 3)
        worlds[size] += 1
        kill = (
            min(step + choice.randrange(4), last),
            choice.choice(MOMENTS[: 2 if step + 3 >= last else 3]),
        )
        # who comes last out of the barrier may be killed by the others' end
        rank = choice.randrange(size) if kill[1] != MOMENTS[2] else 0
        with pytest.raises(WorkerFailed, match="SIGKILL"):
            run_ranks(train, size, args=(directory, kind, generation, workers, (rank, *kill)))
    assert kills < 20 or set(worlds) == {1, 2, 3, 4}
    run_ranks(train, choice.randint(1, 4), args=(directory, kind, kills, 0, None))
    return as_last_run(directory, kills + 1)


@pytest.mark.parametrize(
    ("kind", "kills"),
    [
        ("batches", 2),
        pytest.param("shuffled", 20, marks=pytest.mark.rest),
        pytest.param("sampler", 4, marks=pytest.mark.rest),
    ],
)
def test_what_is_trained_on_is_as_if_nothing_had_happened(
    tmp_path: Path, kind: str, kills: int
) -> None:
    undisturbed = {
        step: {slot: (epoch, batch) for slot, batch in batches.items()}
        for step, epoch, batches in steps(loader(kind, 0, 1, 0))
    }
    found = killed_again_and_again(tmp_path, kind, kills)
    assert found == undisturbed
    for epoch in range(EPOCHS):
        ids = Counter(
            index
            for slots in found.values()
            for number, batch in slots.values()
            if number == epoch
            for index in batch[0]
        )
        if kind != "batches":
            assert ids == Counter(range(SAMPLES))
