"""How long a pipeline's ranks really wait, against the textbook's formula for the bubble.

    python benchmarks/pipeline.py
    python benchmarks/pipeline.py --ranks 4 --schedules 1f1b,interleaved,zero-bubble \\
        --micro-batches 4,8,16

Equal blocks, as many on each rank, large enough that messages cost next to nothing; one intra-op
thread a rank, as many cores as ranks or the figures say nothing. Ranks begin each window together;
what a rank does not spend in forwards and backwards, until the last one is done, is idle. Of
several windows, after one that is not counted, the one at the first quartile of their durations:
what else the host does only makes them longer. The chart of zero-bubble takes both halves of a
backward as equally long; of the first stage torch runs both in one, so that its ranks wait a little
differently.
"""

from __future__ import annotations

import argparse
import warnings
from datetime import timedelta

import torch
from torch import Tensor, nn

from lockstep import World
from lockstep.config.pipeline_schedules import PipelineSchedule
from lockstep.errors import LockstepWarning
from lockstep.model_parallel.layers import layers_of
from lockstep.model_parallel.pipeline import Pipeline
from lockstep.model_parallel.split import balanced
from lockstep.model_parallel.stages import stage_module
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
    group, order = world.group, PipelineSchedule.read(schedule)
    layers = layers_of(nn.Sequential(*[Block() for _ in range(_BLOCKS_A_RANK * group.size)]))
    ranges = balanced([1.0] * len(layers), order.count(group.size))
    stages = {
        number: stage_module(layers, ranges[number])
        for number in order.stages_of(group.rank, group.size)
    }
    pipeline = Pipeline(stages, len(ranges), group, torch.device("cpu"), schedule)
    # with a gradient of its own, so that the first stage works as much as the others
    inputs = [(torch.randn(_ROWS, _WIDTH, requires_grad=True),) for _ in range(micro_batches)]
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LockstepWarning)
        for _ in range(repeats + 1):
            world.barrier()
            pipeline.train(inputs, lambda number, output: output.square().mean())
            found.append((pipeline.busy, pipeline.wall))
    return found[1:]


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
        schedule = PipelineSchedule.read(name)
        for micro_batches in map(int, asked.micro_batches.split(",")):
            schedule.check(asked.ranks, micro_batches)
            windows = run_ranks(
                measured,
                asked.ranks,
                (name, micro_batches, asked.repeats),
                timeout=timedelta(minutes=10),
            )
            found, formula = idle(windows), schedule.bubble(asked.ranks, micro_batches)
            ratio = f"{found / formula:6.2f}" if formula else "     -"
            print(
                f"{name:<14} {asked.ranks:>5} {micro_batches:>13} {found:>8.1%} {formula:>8.1%}"
                f" {ratio}",
                flush=True,
            )


if __name__ == "__main__":
    main()
