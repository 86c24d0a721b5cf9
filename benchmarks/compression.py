"""What a step sends and takes with every way to compress, beside native: a Stepper on layers of
512 x 512, ranks of one host over gloo, in turns.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from torch import nn

import lockstep
from lockstep.testing import run_ranks

WAYS = (None, "bf16", "fp16", "int8", "powersgd:4")


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[layer for _ in range(8) for layer in (nn.Linear(512, 512), nn.ReLU())])


def measure(world: lockstep.World, steps: int) -> list[tuple[str, int, float]]:
    """By way: its name, the bytes that a rank sends in a step, the median milliseconds of a
    step.
    """
    world.group.memory = None  # over gloo, as between hosts: within one host nobody would compress
    steppers = []
    for way in WAYS:
        model = network()
        steppers.append(
            lockstep.Stepper(
                model,
                torch.optim.SGD(model.parameters(), lr=1e-3),
                reduce="native" if way is None else "auto",
                compress=way,
            )
        )
    sent: list[list[int]] = [[] for _ in WAYS]
    seconds: list[list[float]] = [[] for _ in WAYS]
    for step in range(steps):
        x = torch.randn(16, 512, generator=torch.Generator().manual_seed(1000 * step + world.rank))
        for number, stepper in enumerate(steppers):
            begin, before = time.perf_counter(), world.group.bytes_sent
            for batch in stepper.micro_batches([x]):
                stepper.backward(stepper.model(batch).square().sum(), weight=16)
            stepper.step()
            seconds[number].append(time.perf_counter() - begin)
            sent[number].append(world.group.bytes_sent - before)
    return [
        (
            stepper.reducer.reduction.name,
            int(statistics.median(octets)),
            1e3 * statistics.median(times),
        )
        for stepper, octets, times in zip(steppers, sent, seconds, strict=True)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=15)
    given = parser.parse_args()
    found = run_ranks(measure, given.workers, args=(given.steps,))[0]
    native = found[0][1]
    print("compress        bytes a step   native / it   ms a step")
    for name, octets, milliseconds in found:
        print(f"{name:<12} {octets:>15,} {native / octets:>13.1f} {milliseconds:>11.1f}")


if __name__ == "__main__":
    main()
