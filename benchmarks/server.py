"""A parameter server beside synchronous training, where one rank is slow.

    python benchmarks/server.py --workers 4 --slow 5 --epochs 6

A small network learns the handwritten digits. Every micro-batch takes 20 ms of sleep beside its own
work, and on the last rank `--slow` times as much: ranks then wait as they would for a slow device,
however many cores there are. Held-out accuracy is that after the same number of samples.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import lockstep
from lockstep.tasks.digits import datasets

SECONDS = 0.02
SYNCHRONOUS: dict[str, Any] = {"update": "replicated"}


def train(method: dict[str, Any], slow: float, epochs: int, seed: int) -> dict[str, float]:
    """On one rank. Figures are rank 0's, which has them of all."""
    with lockstep.init() as world:
        torch.set_num_threads(1)
        training, held_out = datasets()
        torch.manual_seed(seed)
        model = nn.Sequential(
            nn.Flatten(),
            nn.Linear(64, 96),
            nn.ReLU(),
            nn.Linear(96, 96),
            nn.ReLU(),
            nn.Linear(96, 10),
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
        stepper = lockstep.Stepper(model, optimizer, seed=seed, checks="off", world=world, **method)
        loader = lockstep.Loader(training, global_batch=64, micro_batch=8, seed=seed)
        stepper.draws(loader)
        pause = SECONDS * (slow if world.rank == world.size - 1 else 1)
        mine, ages, counts = 0, [], [0] * world.size
        world.barrier()
        begin = time.perf_counter()
        for epoch in loader.epochs(epochs):
            for window in epoch:
                for x, y in stepper.micro_batches(window):
                    time.sleep(pause)
                    stepper.backward(F.cross_entropy(model(x), y, reduction="sum"), weight=len(y))
                    mine += len(y)
                result = stepper.step()
                ages += [each.age for each in result.windows]
        seconds = time.perf_counter() - begin
        counts = [
            int(world.mean(float(mine), float(world.rank == rank))) for rank in range(world.size)
        ]
        model.eval()
        x, y = held_out.tensors
        with torch.no_grad():
            accuracy = (model(x).argmax(1) == y).double().mean().item()
        return {
            "samples_per_s": len(training) * epochs / seconds,
            "age": sum(ages) / len(ages) if ages else 0.0,
            "accuracy": accuracy,
            "slow_share": counts[-1] / sum(counts),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--slow", type=float, default=5.0, help="times as long as the others")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    methods = {"synchronous": SYNCHRONOUS}
    methods |= {
        f"server, S = {bound}": {"update": "server", "staleness": bound}
        for bound in (0, 1, 4, 16, "inf")
    }
    found: dict[str, list[dict[str, float]]] = {name: [] for name in methods}
    for seed in range(options.seeds):
        for name, method in methods.items():  # in turns
            results = lockstep.launch(
                train, options.workers, args=(method, options.slow, options.epochs, seed)
            )
            found[name].append(results[0])
            print(f"{name}, seed {seed}: {results[0]}", file=sys.stderr, flush=True)
    mean = {
        name: {key: sum(run[key] for run in runs) / len(runs) for key in runs[0]}
        for name, runs in found.items()
    }
    base = mean["synchronous"]["samples_per_s"]
    print(
        f"{options.workers} ranks, one of them {options.slow:g} times slower; {options.epochs}"
        f" epochs of digits, {options.seeds} seed(s)"
    )
    print("| | samples/s | x synchronous | mean age | slow rank's share | held-out accuracy |")
    print("|---|---|---|---|---|---|")
    for name, each in mean.items():
        rate = each["samples_per_s"]
        print(
            f"| {name} | {rate:,.0f} | {rate / base:.2f} | {each['age']:.2f} |"
            f" {100 * each['slow_share']:.0f} % | {each['accuracy']:.4f} |"
        )
    if options.json is not None:
        options.json.write_text(json.dumps(mean, indent=1) + "\n")


if __name__ == "__main__":
    main()
