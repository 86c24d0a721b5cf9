"""How long a pipeline's ranks really wait, against the textbook's formula for the bubble.

    python benchmarks/pipeline.py
    python benchmarks/pipeline.py --ranks 4 --schedules gpipe,1f1b --micro-batches 4,8,16

Equal blocks, as many on each rank, large enough that messages cost next to nothing; one intra-op
thread a rank, as many cores as ranks or the figures say nothing. Ranks begin each window together;
what a rank does not spend in forwards and backwards, until the last one is done, is idle. Of
several windows, after one that is not counted, the one at the first quartile of their durations:
what else the host does only makes them longer.
"""

from __future__ import annotations

import argparse
import time
import warnings
from datetime import timedelta

import torch
from torch import Tensor, nn

from lockstep import World
from lockstep.errors import LockstepWarning
from lockstep.model_parallel import schedules
from lockstep.model_parallel.layers import layers_of
from lockstep.model_parallel.pipeline import Pipeline
from lockstep.model_parallel.split import balanced
from lockstep.model_parallel.stages import stage_module
from lockstep.runtime import status
from lockstep.runtime.step_clock import StepClock
from lockstep.testing import run_ranks

_WIDTH, _ROWS, _BLOCKS_A_RANK = 384, 192, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(_WIDTH, 4 * _WIDTH), nn.Linear(4 * _WIDTH, _WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.narrow(torch.relu(self.wide(x)))
        return out


def measured(
    world: World, schedule: str, micro_batches: int, repeats: int
) -> list[tuple[float, float]]:
    """(busy, wall) seconds of each window."""
    group = world.group
    layers = layers_of(nn.Sequential(*[Block() for _ in range(_BLOCKS_A_RANK * group.size)]))
    ranges = balanced([1.0] * len(layers), group.size)
    stage = stage_module(layers, ranges[group.rank])
    pipeline = Pipeline(stage, group, torch.device("cpu"), schedule)
    clock = StepClock()
    status.open_clock(clock)
    # with a gradient of its own, so that the first stage works as much as the others
    inputs = [(torch.randn(_ROWS, _WIDTH, requires_grad=True),) for _ in range(micro_batches)]
    walls = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LockstepWarning)
        for number in range(repeats + 1):
            world.barrier()
            clock.begin()
            status.enter("loop")
            began = time.perf_counter()
            pipeline.train(inputs, lambda number, output: output.square().mean())
            walls.append(time.perf_counter() - began)
            clock.end(number + 1)
    busy = [times.busy for times in clock.finished()]
    return list(zip(busy, walls, strict=True))[1:]


def idle(windows: list[list[tuple[float, float]]]) -> float:
    """The fraction of all ranks' time, from the start until the last is done, in the window at
    the first quartile of durations.
    """
    totals = sorted(
        (max(wall for _, wall in ranks), sum(busy for busy, _ in ranks))
        for ranks in zip(*windows, strict=True)
    )
    wall, busy = totals[(len(totals) - 1) // 4]
    return float(1 - busy / (wall * len(windows)))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--schedules", default="gpipe,1f1b")
    parser.add_argument("--micro-batches", default="2,4,8")
    parser.add_argument("--repeats", type=int, default=7)
    asked = parser.parse_args()
    print(
        f"{'schedule':<14} {'ranks':>5} {'micro-batches':>13} {'idle':>8} {'formula':>8}"
        f" {'ratio':>6}"
    )
    for name in asked.schedules.split(","):
        for micro_batches in map(int, asked.micro_batches.split(",")):
            schedules.check(name, asked.ranks, micro_batches)
            windows = run_ranks(
                measured,
                asked.ranks,
                (name, micro_batches, asked.repeats),
                timeout=timedelta(minutes=10),
            )
            found = idle(windows)
            formula = schedules.bubble(name, asked.ranks, micro_batches)
            ratio = f"{found / formula:6.2f}" if formula else "     -"
            print(
                f"{name:<14} {asked.ranks:>5} {micro_batches:>13} {found:>8.1%} {formula:>8.1%}"
                f" {ratio}",
                flush=True,
            )


if __name__ == "__main__":
    main()
