"""What saving a checkpoint costs a training: steps while one is being written beside steps while
none is, in turns, on the same ranks.

    python benchmarks/saving.py --workers 2 --mb 100 --rounds 15

The state is a model's and AdamW's (parameters and two moments): `--mb` MB together. A round is some
steps without a save, then a save and the steps until it is on disk. Times are the slowest rank's.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from time import perf_counter

import torch
from torch import nn
from torch.nn import functional as F

import lockstep

WIDTH = 1024
PLAIN_STEPS = 6


def model_of(megabytes: int) -> nn.Module:
    """Linear layers whose parameters and two moments take about `megabytes` MB."""
    layers = max(1, round(megabytes * 1e6 / (3 * 4 * WIDTH * WIDTH)))
    return nn.Sequential(
        *(module for _ in range(layers) for module in (nn.Linear(WIDTH, WIDTH), nn.ReLU()))
    )


def measure(megabytes: int, batch: int, rounds: int, directory: str) -> dict[str, list[float]]:
    with lockstep.init() as world:
        torch.manual_seed(0)
        model = model_of(megabytes)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        stepper = lockstep.Stepper(model, optimizer, world=world)
        checkpoints = lockstep.Checkpoints(directory, stepper, every=10**9, keep=2)
        x = torch.randn(batch, WIDTH)

        def step() -> float:
            begin = perf_counter()
            for mine in stepper.micro_batches([x]):
                stepper.backward(F.mse_loss(model(mine), mine, reduction="sum"), batch)
            stepper.step()
            return slowest(world, perf_counter() - begin)

        for _ in range(5):
            step()
        checkpoints.save()  # the first makes the buffers of the snapshot
        checkpoints.wait()
        seconds: dict[str, list[float]] = {
            "without": [],
            "during": [],
            "snapshot": [],
            "writing": [],
        }
        for _ in range(rounds):
            seconds["without"] += [step() for _ in range(PLAIN_STEPS)]
            begin = perf_counter()
            checkpoints.save()
            seconds["snapshot"].append(slowest(world, perf_counter() - begin))
            while True:
                now = step()
                if world.agree(not checkpoints.saving):
                    break  # some of this step passed without a save
                seconds["during"].append(now)
            checkpoints.wait()
            seconds["writing"].append(slowest(world, perf_counter() - begin))
        checkpoints.close()
        return seconds


def slowest(world: lockstep.World, seconds: float) -> float:
    value = torch.tensor([seconds])
    world.group.all_reduce(value, "max").wait()
    return value.item()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--mb", type=int, default=100)
    parser.add_argument("--batch", type=int, default=64, help="samples of a rank")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument(
        "--directory", type=Path, help="where it is saved; default: a temporary folder"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.directory) as scratch:
        seconds = lockstep.launch(
            measure,
            workers=options.workers,
            args=(options.mb, options.batch, options.rounds, scratch),
        )[0]
    median = {what: statistics.median(values) for what, values in seconds.items() if values}
    quarter = {
        what: statistics.quantiles(values, n=4)[0]
        for what, values in seconds.items()
        if len(values) > 1
    }
    if "during" not in median:
        raise SystemExit(
            "no step began and ended during a save: give a larger --mb or a smaller --batch"
        )
    print(
        f"{options.mb} MB of state, {options.workers} workers: a step takes"
        f" {1e3 * median['without']:.1f} ms, and {1e3 * median['during']:.1f} ms while one is"
        f" written ({len(seconds['during'])} of them): {median['during'] / median['without']:.3f},"
        f" p25 {quarter['during'] / quarter['without']:.3f}; the snapshot"
        f" {1e3 * median['snapshot']:.0f} ms, all of it {1e3 * median['writing']:.0f} ms"
    )


if __name__ == "__main__":
    main()
