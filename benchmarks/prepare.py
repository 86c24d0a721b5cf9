"""What `lockstep.prepare` adds to the Stepper: the same model, micro-batches and losses, in turns.

    lockstep run --workers 1 benchmarks/prepare.py
    lockstep run --workers 2 benchmarks/prepare.py --steps 300

The model is the digits task's, with eight micro-batches of 8 in a step. The first ten steps do not
count.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import lockstep
from lockstep.tasks import digits

_BATCH, _MICRO_BATCH, _FIRST = 64, 8, 10


def parts(task: lockstep.Task) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = task.model()
    return model, task.optimizer(model)


def by_stepper(task: lockstep.Task) -> Iterator[None]:
    """Take a step at each `next`."""
    model, optimizer = parts(task)
    stepper = lockstep.Stepper(model, optimizer)
    loader = lockstep.Loader(task.train_data, global_batch=_BATCH, micro_batch=_MICRO_BATCH)
    for epoch in loader.epochs(10**6):
        for window in epoch:
            for x, y in stepper.micro_batches(window):
                loss = F.cross_entropy(model(x), y)
                stepper.backward(loss, len(y), reduction="mean")
            stepper.step()
            yield


def by_prepare(task: lockstep.Task) -> Iterator[None]:
    """Take a step at each `next`."""
    model, optimizer = parts(task)
    data = DataLoader(task.train_data, batch_size=_BATCH, shuffle=True)
    model, optimizer, loader = lockstep.prepare(model, optimizer, data, micro_batch=_MICRO_BATCH)
    for x, y in loader.endless():
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if loader.stepped:
            yield


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=200)
    steps = parser.parse_args().steps
    torch.set_num_threads(1)
    with lockstep.init() as world:
        task = digits.task()
        ways = {"Stepper": by_stepper(task), "prepare": by_prepare(task)}
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(_FIRST + steps):
            for way, training in ways.items():
                begin = time.perf_counter()
                next(training)
                seconds[way].append(time.perf_counter() - begin)
        if world.rank == 0:
            quarter = {}
            for way, found in seconds.items():
                quarter[way] = statistics.quantiles(found[_FIRST:], n=4)[0]
                print(f"{way}: {1e3 * quarter[way]:.2f} ms a step (25th percentile)")
            print(f"prepare adds {quarter['prepare'] / quarter['Stepper'] - 1:.1%}")


if __name__ == "__main__":
    main()
