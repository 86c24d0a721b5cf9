"""How much of an asynchronous all-reduce is hidden behind a matrix product.

    python benchmarks/overlap.py --workers 2 --mib 25 --runs 15

Three things in turns: the product alone, the all-reduce alone, and the product while the all-reduce
is under way. Hidden is what the third spares of the second: 1 - (both - product) / all-reduce. On
CPUs the two share the cores, so what is hidden is waiting, not copying.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

import lockstep
from lockstep import collectives


def measure(mib: float, algorithms: list[str], runs: int) -> dict[str, tuple[float, float, float]]:
    """Seconds of (product, all-reduce, both) by algorithm: medians of the slowest rank."""
    with lockstep.init() as world:
        side = 512
        a = torch.randn(side, side, device=world.device)
        tensor = torch.ones(int(mib * 2**18), device=world.device)
        products = _as_long_as(tensor, a)
        found = {}
        for algorithm in algorithms:
            rows = []
            for _ in range(runs + 2):
                rows.append(
                    [
                        _timed(world, what, a, products, tensor, algorithm)
                        for what in ("product", "all-reduce", "both")
                    ]
                )
            slowest = torch.tensor(rows[2:], dtype=torch.float64)
            world.control.all_reduce(slowest, "max").wait()
            found[algorithm] = tuple(statistics.median(column) for column in slowest.T.tolist())
        return found


def _as_long_as(tensor: torch.Tensor, a: torch.Tensor) -> int:
    """So many products that they take about as long as the all-reduce, the same number on all
    ranks.
    """
    reduce, product = [], []
    for _ in range(5):
        begin = time.perf_counter()
        collectives.all_reduce(tensor, algorithm="native")
        middle = time.perf_counter()
        a @ a
        reduce.append(middle - begin)
        product.append(time.perf_counter() - middle)
    count = torch.tensor([max(1, int(statistics.median(reduce) / statistics.median(product)))])
    return int(collectives.all_reduce(count, "max", algorithm="native"))


def _timed(
    world: lockstep.World,
    what: str,
    a: torch.Tensor,
    products: int,
    tensor: torch.Tensor,
    algorithm: Any,
) -> float:
    world.control.all_reduce(torch.zeros(1)).wait()
    begin = time.perf_counter()
    handle = (
        collectives.all_reduce(tensor, "max", algorithm=algorithm, async_op=True)
        if what != "product"
        else None
    )
    if what != "all-reduce":
        for _ in range(products):
            a @ a
    if handle is not None:
        handle.wait()
    if world.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--mib", type=float, default=25)
    parser.add_argument("--algorithms", default="native,ring,halving_doubling")
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = lockstep.launch(
        measure,
        workers=options.workers,
        args=(options.mib, options.algorithms.split(","), options.runs),
    )[0]
    print(
        f"{options.workers} ranks, all-reduce of {options.mib:g} MiB, medians of {options.runs}"
        " runs"
    )
    for algorithm, (product, reduce, both) in found.items():
        hidden = 1 - (both - product) / reduce
        print(
            f"  {algorithm:<18} product {1e3 * product:7.1f} ms   all-reduce {1e3 * reduce:7.1f} ms"
            f"   both {1e3 * both:7.1f} ms   hidden {hidden:5.0%}"
        )
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
