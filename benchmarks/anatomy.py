"""What it costs to know where the time of a step goes: notes of phases and waits, the end of a
step, and its line in RUN/anatomy.

    python benchmarks/anatomy.py --workers 2 --models mlp,transformer,cnn --steps 60

It is too little to be told from noise by timing steps with it and without. So notes are counted and
one is timed, in a loop of them, as what it takes more than without a clock; the end of a step and
the line are timed where they happen. The share is of the median step, on the rank where it is
largest.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import lockstep
from cases import CASES, loss
from lockstep.data.windows import Cut, Window
from lockstep.runtime import status
from lockstep.runtime.step_clock import StepClock
from lockstep.training.anatomy import AnatomyFile

_LOOP = 20_000
_WARM_UP = 25  # steps; the first are written in more detail than the others


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one rank, in seconds."""

    step: float
    notes: float
    """How many a step."""
    note: float
    end: float
    line: float

    @property
    def share(self) -> float:
        return (self.notes * self.note + self.end + self.line) / self.step


class Timed:
    """A function that remembers what its calls took."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function, self.seconds = function, list[float]()

    def __call__(self, *arguments: Any) -> Any:
        begin = time.perf_counter()
        found = self._function(*arguments)
        self.seconds.append(time.perf_counter() - begin)
        return found


def one_note() -> float:
    """Seconds that a note takes more with a clock."""
    found = []
    for clock in (None, StepClock()):
        status._clock = clock
        begin = time.perf_counter()
        for _ in range(_LOOP // 2):
            status.enter("forward")
            status.enter("backward")
        found.append((time.perf_counter() - begin) / _LOOP)
    status._clock = None
    return found[1] - found[0]


def measure(name: str, steps: int, folder: str) -> list[Cost]:
    """Every rank's."""
    with lockstep.init() as world:
        case = CASES[name]
        generator = torch.Generator().manual_seed(world.rank)
        torch.manual_seed(0)
        model = case.model()
        stepper = lockstep.Stepper(
            model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        )
        end = stepper.clock.end = Timed(stepper.clock.end)  # type: ignore[method-assign, assignment]  # timed
        notes = [0]

        def note(step: int, phase: str) -> None:
            notes[0] += 1

        status.on_phase(note)
        taken = []
        with AnatomyFile(Path(folder), stepper, {}) as file:
            line = Timed(file.step)
            for step in range(steps + _WARM_UP):
                batch = case.samples(case.batch, generator)
                window = Window(
                    Cut(step, 0, 0, case.batch, case.batch, world.size),
                    world.rank,
                    world.size,
                    tuple,
                )
                world.group.all_reduce(torch.zeros(1)).wait()
                begin = time.perf_counter()
                for micro in stepper.micro_batches([batch]):
                    stepper.backward(*loss(model(micro[0]), micro))
                result = stepper.step()
                taken.append(time.perf_counter() - begin)
                line(result, window)
        medians = [
            statistics.median(each[_WARM_UP:]) for each in (taken, end.seconds, line.seconds)
        ]
        mine = torch.tensor(
            [medians[0], notes[0] / len(taken), one_note(), medians[1], medians[2]],
            dtype=torch.float64,
        )
        return [Cost(*row.tolist()) for row in world.group.all_gather(mine).view(world.size, -1)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--models", default="mlp,transformer,cnn")
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    print(
        f"{'model':<14}{'a step':>12}{'notes':>8}{'a note':>11}{'the end':>11}{'the line':>11}{'share':>10}"
    )
    for name in options.models.split(","):
        with tempfile.TemporaryDirectory() as folder:
            every = lockstep.launch(
                measure, workers=options.workers, args=(name, options.steps, folder)
            )[0]
        cost = max(every, key=lambda each: each.share)
        print(
            f"{name:<14}{1e3 * cost.step:>9.2f} ms{cost.notes:>8.1f}{1e6 * cost.note:>8.2f}"
            f" us{1e6 * cost.end:>8.1f} us{1e6 * cost.line:>8.1f} us{cost.share:>10.3%}"
        )


if __name__ == "__main__":
    main()
