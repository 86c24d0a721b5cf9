"""All-reduce of float32 tensors among ranks of one host: gloo, `lockstep.collectives`, MPICH
through mpi4py where installed, and the limit. Once in a process group that the user's own code
opened, once in a world of Lockstep's own.

    python benchmarks/allreduce.py --workers 2
    python benchmarks/allreduce.py --workers 4 --sizes 4K,64K,1M,25M

Different data on each rank; every timed result is compared as well. The ways take turns, call by
call; 25th percentile and median, of the slowest rank. "in place" sums a tensor that lies in shared
memory itself, as a bucket of gradients does. The limit is S / the time of one Tensor.copy_ of S
bytes, one thread a rank, all ranks at once: no all-reduce of private tensors can do without reading
and writing them once.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import lockstep
from lockstep import collectives
from lockstep.collectives.shared_memory.operations import HostMemory
from lockstep.tools.drawing import SERIES, Plot, figure

SIZES = "4K,16K,64K,256K,1M,4M,16M,25M,64M"
_UNITS = {"K": 2**10, "M": 2**20}

MPI = """
import json, statistics, sys, time
import numpy as np
from mpi4py import MPI

world, found = MPI.COMM_WORLD, {}
for size, calls in json.loads(sys.argv[1]):
    mine = np.random.default_rng(world.rank).standard_normal(size // 4).astype(np.float32)
    total, seconds = np.empty_like(mine), []
    for call in range(calls + 3):
        world.Barrier()
        begin = time.perf_counter()
        world.Allreduce(mine, total)
        seconds.append(time.perf_counter() - begin)
    slowest = np.max(world.allgather(seconds[3:]), axis=0)
    found[size] = [statistics.quantiles(slowest, n=4)[0], statistics.median(slowest)]
if world.rank == 0:
    print(json.dumps(found))
"""


def calls_for(size: int) -> int:
    return max(12, min(200, 2**28 // size))


def measure(sizes: list[int], own_world: bool) -> dict[int, dict[str, list[float]]]:
    """Seconds of every call of every way, of the slowest rank, by size."""
    torch.set_num_threads(1)
    if own_world:
        with lockstep.init() as world:
            return {size: one_size(size, world.group.memory) for size in sizes}
    dist.init_process_group("gloo")
    found = {size: one_size(size, None) for size in sizes}
    dist.destroy_process_group()
    return found


def one_size(size: int, memory: HostMemory | None) -> dict[str, list[float]]:
    rank = dist.get_rank()
    mine = torch.randn(size // 4, generator=torch.Generator().manual_seed(rank))
    expected = mine.clone()
    dist.all_reduce(expected)
    room, copy = mine.clone(), torch.empty_like(mine)
    ways: dict[str, tuple[Tensor, Callable[[Tensor], object]]] = {
        "gloo": (room, dist.all_reduce),
        "lockstep": (room, collectives.all_reduce),
    }
    if memory is not None:
        (everybodys,) = memory.allocate([size // 4], [torch.float32])
        ways["in place"] = everybodys[rank], partial(_in_place, memory, everybodys)
        ways["limit"] = room, copy.copy_
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for call in range(calls_for(size) + 3):
        for name in ways if call % 2 else reversed(ways):
            target, reduce = ways[name]
            target.copy_(mine)
            for _ in range(2):  # all leave it within microseconds
                collectives.all_reduce(torch.zeros(1))
            begin = time.perf_counter()
            reduce(target)
            if call >= 3:
                seconds[name].append(time.perf_counter() - begin)
            _check(name, target, expected)
    slowest = torch.tensor(list(seconds.values()), dtype=torch.float64)
    collectives.all_reduce(slowest, "max")
    return dict(zip(ways, slowest.tolist(), strict=True))


def _in_place(memory: HostMemory, everybodys: list[Tensor], tensor: Tensor) -> None:
    memory.sum_in_place(everybodys, "here").wait()


def _check(name: str, result: Tensor, expected: Tensor) -> None:
    if name != "limit":
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)


def by_mpi(sizes: list[int], workers: int) -> dict[int, tuple[float, float]]:
    """25th percentile and median of MPICH's, in a run of its own: it spins while others compute."""
    if importlib.util.find_spec("mpi4py") is None:
        return {}
    plan = json.dumps([(size, calls_for(size)) for size in sizes])
    launcher = Path(sys.executable).with_name("mpiexec")
    command = [str(launcher), "-n", str(workers), sys.executable, "-c", MPI, plan]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        print(f"mpi4py did not run: {done.stderr.strip().splitlines()[-1:]}", file=sys.stderr)
        return {}
    return {
        int(size): (quarter, median) for size, (quarter, median) in json.loads(done.stdout).items()
    }


def summary(
    found: dict[int, dict[str, list[float]]], mpi: dict[int, tuple[float, float]]
) -> list[dict[str, Any]]:
    rows = []
    for size, ways in found.items():
        row: dict[str, Any] = {"bytes": size}
        for name, seconds in ways.items():
            row[name] = {
                "p25": statistics.quantiles(seconds, n=4)[0],
                "median": statistics.median(seconds),
            }
        if size in mpi:
            row["mpich"] = {"p25": mpi[size][0], "median": mpi[size][1]}
        rows.append(row)
    return rows


def plot(rows: list[dict[str, Any]], workers: int, file: Path) -> None:
    names = [name for name in rows[0] if name != "bytes"]
    colours = dict(zip(names, SERIES, strict=False))
    curves = {
        name: [(row["bytes"], 1e6 * row[name]["p25"]) for row in rows if name in row]
        for name in names
    }
    times = [time for points in curves.values() for _, time in points]
    chart = Plot(
        (rows[0]["bytes"], rows[-1]["bytes"]),
        "bytes",
        up=(min(times), max(times)),
        up_label="25th percentile, us",
        legend=colours,
        log="across up",
    )
    for name, points in curves.items():
        chart.curve(points, colours[name], dots=True)
    figure(f"all-reduce, {workers} ranks of one host", [chart]).save(file)


def report(title: str, rows: list[dict[str, Any]], workers: int) -> None:
    print(
        f"{title}, {workers} ranks, torch {torch.__version__}: 25th percentile / median in us,"
        " gloo's over it, and share of the limit"
    )
    for row in rows:
        for name in [each for each in row if each != "bytes"]:
            quarter, median = row[name]["p25"], row[name]["median"]
            ratios = row["gloo"]["p25"] / quarter, row["gloo"]["median"] / median
            share = f"{row['limit']['p25'] / quarter:8.0%}" if "limit" in row else ""
            print(
                f"{row['bytes']:>10} B  {name:<10} {1e6 * quarter:10.1f} {1e6 * median:10.1f}"
                f"   {ratios[0]:6.2f}x {ratios[1]:6.2f}x{share}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--sizes", default=SIZES)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    sizes = [
        int(text[:-1]) * _UNITS[text[-1]] if text[-1] in _UNITS else int(text)
        for text in options.sizes.split(",")
    ]
    mpi = by_mpi(sizes, options.workers)
    tables = {}
    for title, own_world in (("a process group of the user", False), ("a world of its own", True)):
        found = lockstep.launch(measure, workers=options.workers, args=(sizes, own_world))[0]
        tables[title] = summary(found, mpi)
        report(title, tables[title], options.workers)
    if options.json:
        options.json.write_text(
            json.dumps({"workers": options.workers, "torch": torch.__version__, **tables}, indent=1)
        )
    if options.out:
        plot(tables["a world of its own"], options.workers, options.out)


if __name__ == "__main__":
    main()
