"""What a witness costs, and whether it is ever wrong.

    python benchmarks/witness.py --workers 2                        cost of 1 % of the steps
    python benchmarks/witness.py --workers 2 --alarms 10000         so many witnessed steps

Cost: digits in exact mode, with and without a witness, by turns of 200 steps each; the slowest
rank's time, the 25th percentile over the turns. Each turn has two witnessed steps.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import lockstep
from lockstep.data.windows import ENDLESS, Window
from lockstep.tasks import digits

TURN = 200  # steps


class Training:
    """With a witness of this share of steps, or none."""

    def __init__(self, task: lockstep.Task, witness: float | None, world: lockstep.World) -> None:
        torch.manual_seed(0)
        model = task.model()
        self.task, optimizer = task, task.optimizer(model)
        self.stepper = lockstep.Stepper(
            model, optimizer, exact=True, witness=witness, clip=task.clip, world=world
        )
        loader = lockstep.Loader(
            task.train_data, global_batch=task.global_batch, micro_batch=task.micro_batch
        )
        self._windows = self._endless(loader)

    def _endless(self, loader: lockstep.Loader) -> Iterator[Window]:
        for epoch in loader.epochs(ENDLESS):
            yield from epoch

    def run(self, steps: int) -> None:
        for _ in range(steps):
            for batch in self.stepper.micro_batches(next(self._windows)):
                output = self.stepper.model(*self.task.inputs(batch))
                self.stepper.backward(*self.task.loss(output, batch))
            self.stepper.step()


def tiny() -> lockstep.Task:
    draws = torch.Generator().manual_seed(0)
    data = TensorDataset(
        torch.randn(320, 8, generator=draws), torch.randint(0, 3, (320,), generator=draws)
    )
    return lockstep.Task(
        model=lambda: nn.Sequential(
            nn.Linear(8, 32), nn.BatchNorm1d(32), nn.Dropout(0.1), nn.Linear(32, 3)
        ),
        train_data=data,
        loss=lambda output, batch: (F.cross_entropy(output, batch[1], reduction="sum"), 16),
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
        global_batch=64,
        micro_batch=16,
        clip=1.0,
    )


def alarms(steps: int) -> int:
    """Witnessed steps of a tiny model; a false alarm would be raised."""
    with lockstep.init() as world:
        training = Training(tiny(), 1.0, world)
        training.run(steps)
        assert training.stepper.witness is not None
        return (training.stepper.witness.witnessed or 0) + 1


def cost(turns: int) -> tuple[list[float], list[float]]:
    """Seconds of each turn without and with a witness."""
    with lockstep.init() as world:
        trainings = [Training(digits.task(), witness, world) for witness in (None, 0.01)]
        for each in trainings:
            each.run(TURN)
        seconds: tuple[list[float], list[float]] = [], []
        for turn in range(turns):
            for number in (0, 1) if turn % 2 else (1, 0):
                world.barrier()
                begin = time.perf_counter()
                trainings[number].run(TURN)
                world.barrier()
                seconds[number].append(time.perf_counter() - begin)
        return seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--turns", type=int, default=8, help="of 200 steps, of each of the two")
    parser.add_argument("--alarms", type=int, help="so many witnessed steps of a tiny model")
    options = parser.parse_args()
    if options.alarms:
        count = lockstep.launch(alarms, options.workers, (options.alarms,))[0]
        print(f"{options.workers} workers: {count} witnessed steps, 0 false alarms")
        return
    without, witness = lockstep.launch(cost, options.workers, (options.turns,))[0]
    quarters = [statistics.quantiles(each, n=4)[0] for each in (without, witness)]
    ratios = [b / a for a, b in zip(without, witness, strict=True)]
    print(
        f"digits, {options.workers} workers: a step {1000 * quarters[0] / TURN:.2f} ms, with a"
        f" witness of 1 % {1000 * quarters[1] / TURN:.2f} ms:"
        f" {100 * (quarters[1] / quarters[0] - 1):+.2f} %; median of"
        f" {options.turns} pairs {100 * (statistics.median(ratios) - 1):+.2f} %"
    )


if __name__ == "__main__":
    main()
