"""Memory that a host needs for the ranks of one training: the sum of their proportional set sizes.

    python benchmarks/host_memory.py --workers 4

A proportional set size (Pss in /proc/PID/smaps_rollup) counts a page that n processes map as 1 / n
page for each. It is read in each rank after five steps, while all ranks wait. Each way is started
twice: in processes of their own, by torchrun, and forked from one process, by lockstep.launch.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

import torch

import baselines
import cases
import lockstep
from baselines import feed
from lockstep.launcher.launch import launch
from lockstep.tools.timing.output_files import write_json

STEPS = 5
VARIANTS = ("ddp:25", "stepper:shared", "stepper:sharded", "stepper:weights")


def on_rank(name: str, model: str) -> float:
    """MiB of all ranks together."""
    with lockstep.init() as world:
        task = cases.task_of(model, world.size, False)
        given = feed(task, "fp32", world)
        way = baselines.maker(name, {})(
            baselines.Setting(task=task, world=world, precision="fp32", steps=STEPS, keyed=False)
        )
        for step in range(STEPS):
            way(given.given[step % len(given.given)])
        world.barrier()
        rollup = Path("/proc/self/smaps_rollup").read_text(encoding="ascii")
        (pss,) = (int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:"))
        total = torch.tensor(pss / 1024)
        world.group.all_reduce(total).wait()
        return total.item()


def by_torchrun(name: str, model: str, workers: int) -> float:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={workers}", __file__, "--models", model, "--only", name]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return float(said.split()[0])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--models", default="mlp")
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--only", help="be a rank that torchrun started, with this variant")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    if options.only:
        total = on_rank(options.only, options.models)
        if os.environ["RANK"] == "0":
            print(total)
        return
    found = {}
    for model in options.models.split(","):
        print(f"{model}, {options.workers} ranks, MiB of the host      torchrun    lockstep.launch")
        for name in options.variants.split(","):
            forked = launch(on_rank, workers=options.workers, args=(name, model))[0]
            found[f"{model} {name}"] = both = [by_torchrun(name, model, options.workers), forked]
            print(f"  {name:<38}" + "".join(f"{each:>14.0f}" for each in both), flush=True)
    write_json(options.json, found)


if __name__ == "__main__":
    main()
