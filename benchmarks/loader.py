"""The Loader against a plain DataLoader with torch's DistributedSampler: the same samples from
memory, in turns, in one run.

    python benchmarks/loader.py --samples 20000 --rounds 9
    python benchmarks/loader.py --samples 20000 --rounds 9 --augment      # every sample draws a random number

An epoch of one rank of two, in micro-batches of 32 samples of 1 KiB. Then the beginning of an epoch
over 10^7 samples: the first micro-batch, the first 1000, and the peak memory that they took
besides.
"""

from __future__ import annotations

import argparse
import statistics
import time
import tracemalloc
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from lockstep import Loader

RANKS, MICRO_BATCH = 2, 32


class Items(Dataset[Tensor]):
    """`samples` samples of 1 KiB, of which at most 20,000 are different."""

    def __init__(self, samples: int, augment: bool) -> None:
        self.samples, self.augment = samples, augment
        self.data = torch.randn(min(samples, 20_000), 256)

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Tensor:
        row = self.data[index % len(self.data)]
        return row + torch.rand(()) if self.augment else row


def plain(dataset: Items, workers: int) -> Callable[[int], Iterator[Any]]:
    sampler: DistributedSampler[Any] = DistributedSampler(dataset, num_replicas=RANKS, rank=0)
    loader = DataLoader(
        dataset,
        batch_size=MICRO_BATCH,
        sampler=sampler,
        num_workers=workers,
        persistent_workers=workers > 0,
    )

    def epoch(number: int) -> Iterator[Any]:
        sampler.set_epoch(number)
        return iter(loader)

    return epoch


def ours(dataset: Items, workers: int, micro_batches: int) -> Callable[[int], Iterator[Any]]:
    batch = RANKS * MICRO_BATCH * micro_batches
    loader = Loader(
        dataset,
        global_batch=batch,
        micro_batch=MICRO_BATCH,
        num_workers=workers,
        device="cpu",
        rank=0,
        size=RANKS,
    )

    def epoch(number: int) -> Iterator[Any]:
        return (
            batch for window in next(loader.epochs(number + 1, start=number)) for batch in window
        )

    return epoch


def throughput(samples: int, rounds: int, workers: int, augment: bool) -> None:
    dataset = Items(samples, augment)
    kinds = {
        "plain": plain(dataset, workers),
        "lockstep": ours(dataset, workers, 1),
        "lockstep, windows of 4": ours(dataset, workers, 4),
    }
    seconds: dict[str, list[float]] = {name: [] for name in kinds}
    for number in range(rounds + 1):
        for name in kinds if number % 2 else reversed(kinds):
            begin = time.perf_counter()
            batches = sum(1 for _ in kinds[name](number))
            if number:  # the first starts the workers
                seconds[name].append((time.perf_counter() - begin) / batches)
    print(
        f"{samples} samples of 1 KiB, num_workers={workers}{', augmented' if augment else ''}: a"
        f" micro-batch of {MICRO_BATCH}"
    )
    median = {name: statistics.median(values) for name, values in seconds.items()}
    for name, value in median.items():
        paired = statistics.median(
            a / b for a, b in zip(seconds[name], seconds["plain"], strict=True)
        )
        print(
            f"  {name:<24} {1e6 * value:8.1f} us   {100 * (paired - 1):+6.1f} % of plain (median of"
            " pairs)"
        )


def beginning(samples: int) -> None:
    dataset = Items(samples, augment=False)
    print(f"{samples:.0e} samples: how an epoch begins")
    for name, make in (
        ("plain", plain),
        ("lockstep", lambda data, workers: ours(data, workers, 1)),
    ):
        times = []
        for count in (1, 1000):
            epoch = make(dataset, 0)
            begin = time.perf_counter()
            for _ in islice(epoch(0), count):
                pass
            times.append(time.perf_counter() - begin)
        tracemalloc.start()
        next(make(dataset, 0)(1))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        print(
            f"  {name:<24} first micro-batch {1e3 * times[0]:9.2f} ms   first 1000"
            f" {1e3 * times[1]:9.1f} ms   {peak / 2**20:7.1f} MiB of objects"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--workers", default="0,2")
    parser.add_argument("--augment", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for workers in map(int, options.workers.split(",")):
        throughput(options.samples, options.rounds, workers, options.augment)
    beginning(10_000_000)


if __name__ == "__main__":
    main()
