"""The Loader against torch's DataLoader with torch's DistributedSampler: the same samples, in
turns, in one run, both with workers that stay.

    python benchmarks/loader.py --cases rows,images --workers 0,2
    python benchmarks/loader.py --beginning            # how an epoch over 10^7 samples begins
    python benchmarks/loader.py --device cuda --pin-memory

An epoch is one rank's of two. A case is a kind of sample and the size of a micro-batch; "x 4" are
windows of four micro-batches. `--device cuda`: both end with the batch on the GPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import tracemalloc
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

from lockstep import Loader
from lockstep.data.device import to_device

RANKS = 2
_SECONDS = 0.15  # about that long an epoch is


class Rows(Dataset[Any]):
    """Rows of a tensor, of which at most 20,000 are different; `made` makes a sample of one."""

    def __init__(self, samples: int, size: int, made: Callable[[Tensor], Tensor]) -> None:
        self.samples, self.made = samples, made
        self.data = torch.randn(min(samples, 20_000), size)

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Tensor:
        return self.made(self.data[index % len(self.data)])


class AtOnce(TensorDataset):
    """Has a way of its own to fetch several samples."""

    def __getitems__(self, indices: list[int]) -> list[tuple[Tensor, ...]]:
        return list(zip(*(each[indices] for each in self.tensors), strict=True))


def as_it_is(row: Tensor) -> Tensor:
    return row


def drawing(row: Tensor) -> Tensor:
    return row + torch.rand(())


def sleeping(row: Tensor) -> Tensor:
    time.sleep(0.0005)
    return row


_PACKED = zlib.compress(torch.randint(0, 64, (16384,), dtype=torch.uint8).numpy().tobytes())


def decoding(row: Tensor) -> Tensor:
    octets = torch.frombuffer(bytearray(zlib.decompress(_PACKED)), dtype=torch.uint8)
    return octets.float() + row[0]


def tensors(kind: type[TensorDataset], size: Sequence[int], samples: int) -> Dataset[Any]:
    rows = min(samples, 200_000)
    return kind(torch.randn(rows, *size), torch.randint(0, 10, (rows,)))


@dataclass(frozen=True)
class Case:
    data: Callable[[int], Dataset[Any]]
    """Of so many samples."""
    micro_batch: int
    seconds: float
    """That a micro-batch takes, about."""
    micro_batches: int = 1


_IMAGES = partial(tensors, TensorDataset, (1, 28, 28))
CASES = {
    "rows": Case(partial(tensors, TensorDataset, (16,)), 8, 5e-5),
    "rows x 4": Case(partial(tensors, TensorDataset, (16,)), 8, 5e-5, 4),
    "rows256": Case(partial(tensors, TensorDataset, (16,)), 256, 1e-3),
    "at-once": Case(partial(tensors, AtOnce, (16,)), 32, 1e-4),
    "images": Case(_IMAGES, 32, 2e-4),
    "images x 4": Case(_IMAGES, 32, 2e-4, 4),
    "images256": Case(_IMAGES, 256, 2e-3),
    "large": Case(partial(tensors, TensorDataset, (3, 64, 64)), 64, 3e-3),
    "drawing": Case(lambda samples: Rows(samples, 256, drawing), 32, 5e-4),
    "decoding": Case(lambda samples: Rows(samples, 4, decoding), 32, 5e-3),
    "sleeping": Case(lambda samples: Rows(samples, 256, sleeping), 32, 2e-2),
}


def plain(
    dataset: Any, micro_batch: int, workers: int, device: torch.device, pinned: bool
) -> Callable[[int], Iterator[Any]]:
    sampler: DistributedSampler[Any] = DistributedSampler(dataset, num_replicas=RANKS, rank=0)
    loader = DataLoader(
        dataset,
        batch_size=micro_batch,
        sampler=sampler,
        num_workers=workers,
        persistent_workers=workers > 0,
        pin_memory=pinned,
    )

    def epoch(number: int) -> Iterator[Any]:
        sampler.set_epoch(number)
        if device.type == "cpu":
            return iter(loader)
        return (to_device(batch, device, non_blocking=True) for batch in loader)

    return epoch


def ours(
    dataset: Any,
    micro_batch: int,
    workers: int,
    device: torch.device,
    pinned: bool,
    micro_batches: int = 1,
) -> Callable[[int], Iterator[Any]]:
    loader = Loader(
        dataset,
        global_batch=RANKS * micro_batch * micro_batches,
        micro_batch=micro_batch,
        num_workers=workers,
        pin_memory=pinned,
        device=device,
        rank=0,
        size=RANKS,
    )

    def epoch(number: int) -> Iterator[Any]:
        return (
            batch for window in next(loader.epochs(number + 1, start=number)) for batch in window
        )

    return epoch


def throughput(
    name: str, rounds: int, workers: int, device: torch.device, pinned: bool
) -> dict[str, Any]:
    """Median microseconds a micro-batch, and the median of the ratios of pairs."""
    case = CASES[name]
    # to hand a batch over takes a DataLoader's worker a millisecond
    estimate = max(case.seconds, 1e-3) if workers else case.seconds
    batches = max(4, round(_SECONDS / estimate / 4)) * 4
    dataset = case.data(batches * RANKS * case.micro_batch)
    ways = {
        "plain": plain(dataset, case.micro_batch, workers, device, pinned),
        "ours": ours(dataset, case.micro_batch, workers, device, pinned, case.micro_batches),
    }
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(rounds + 1):
        for way in ways if number % 2 else reversed(ways):
            begin = time.perf_counter()
            count = sum(1 for _ in ways[way](number))
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            if number:  # the first starts the workers
                seconds[way].append((time.perf_counter() - begin) / count)
    pairs = zip(seconds["ours"], seconds["plain"], strict=True)
    return {
        "case": name,
        "workers": workers,
        "plain_us": 1e6 * statistics.median(seconds["plain"]),
        "ours_us": 1e6 * statistics.median(seconds["ours"]),
        "ratio": statistics.median(a / b for a, b in pairs),
    }


def table(rows: Sequence[dict[str, Any]], workers: Sequence[int]) -> str:
    """A line a case: DataLoader's microseconds, and the Loader's share of them."""
    lines = ["| micro-batch |" + "".join(f" num_workers={count} |" for count in workers)]
    lines.append("|---" * (1 + len(workers)) + "|")
    for name in dict.fromkeys(row["case"] for row in rows):
        found = {row["workers"]: row for row in rows if row["case"] == name}
        cells = [f"{found[each]['plain_us']:.0f} us, {found[each]['ratio']:.2f}" for each in found]
        lines.append(f"| {name}, {CASES[name].micro_batch} samples | {' | '.join(cells)} |")
    return "\n".join(lines)


def beginning(samples: int) -> None:
    dataset, here = Rows(samples, 256, as_it_is), torch.device("cpu")
    print(f"{samples:.0e} samples: how an epoch begins")
    for name, make in (("DataLoader", plain), ("Loader", ours)):
        times = []
        for count in (1, 1000):
            epoch = make(dataset, 32, 0, here, False)
            begin = time.perf_counter()
            for _ in islice(epoch(0), count):
                pass
            times.append(time.perf_counter() - begin)
        tracemalloc.start()
        next(make(dataset, 32, 0, here, False)(1))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        print(
            f"  {name:<12} first micro-batch {1e3 * times[0]:9.2f} ms   first 1000"
            f" {1e3 * times[1]:9.1f} ms   {peak / 2**20:7.1f} MiB of objects"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--workers", default="0,1,2,4")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--pin-memory", action="store_true")
    parser.add_argument("--beginning", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    # more workers than cores, and pinned memory without a GPU: asked for
    warnings.filterwarnings("ignore", module="torch.utils.data")
    if options.beginning:
        beginning(10_000_000)
        return
    workers = [int(each) for each in options.workers.split(",")]
    device = torch.device(options.device)
    rows = [
        throughput(name, options.rounds, count, device, options.pin_memory)
        for name in options.cases.split(",")
        for count in workers
    ]
    print(table(rows, workers), flush=True)
    if options.json:
        options.json.write_text(json.dumps({"rows": rows}, indent=1))


if __name__ == "__main__":
    main()
