"""A training step on several hosts against torch's DistributedDataParallel over Gloo, in turns, in
one run, on the same ranks.

    sudo python benchmarks/hosts.py
    sudo python benchmarks/hosts.py --hosts 2 --ranks 1 --rates 1gbit --models small-mlp,transformer

The hosts are network namespaces of this machine, joined by links of that rate with a delay
(namespaces.py; ip and tc, from iproute2, and root). The ranks of all of them share its cores. What
is measured, and how, is in steps.py and baselines.py; "auto" is the reduction that Lockstep takes by
itself, which is hierarchical where it is faster than native.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from dataclasses import asdict
from functools import partial
from pathlib import Path

import namespaces
import steps
from cases import CASES, task_of
from lockstep.tools.timing.output_files import check_writable, write_json

VARIANTS = (
    "local",
    "ddp:1",
    "ddp:5",
    "ddp:25",
    "wrapper:native",
    "stepper:native",
    "wrapper:auto",
    "stepper:auto",
)


def compare(
    hosts: int, ranks: int, rate: str, model: str, options: argparse.Namespace
) -> steps.StepComparison:
    """Measure on so many hosts with so many ranks each."""
    variants = options.variants.split(",")
    size = hosts * ranks
    with (
        namespaces.hosts(hosts, rate, options.delay / 2000) as made,
        tempfile.TemporaryDirectory() as folder,
    ):
        started = []
        for rank in range(size):
            environment = namespaces.variables_of(rank, made, ranks)
            environment["GLIBC_TUNABLES"] = "glibc.malloc.hugetlb=1"  # as Lockstep's launcher
            words = [sys.executable, __file__, "--on-rank", folder, "--models", model]
            words += ["--variants", options.variants, "--steps", str(options.steps)]
            log = f"{folder}/{rank}.log"
            started.append(made[rank // ranks].start(words, environment=environment, log=log))
        codes = [process.wait() for process in started]
        if any(codes):
            wrong = next(rank for rank, code in enumerate(codes) if code)
            sys.exit(Path(folder, f"{wrong}.log").read_text())
        found = json.loads(Path(folder, "found.json").read_text())
    rows = [
        steps.StepRow(variant=name, seconds=found["seconds"][name], apart=found["apart"].get(name))
        for name in variants
    ]
    return steps.StepComparison(
        task=model,
        recipe=f"{hosts} hosts x {ranks}, {rate}, {options.delay:g} ms there and back",
        workers=size,
        device="cpu",
        precision="fp32",
        steps=options.steps,
        gradient_mib=found["gradient_mib"],
        rows=rows,
        notes=found["notes"],
    )


def on_rank(folder: Path, model: str, options: argparse.Namespace) -> None:
    """Be a rank."""
    size = int(os.environ["WORLD_SIZE"])
    found = steps.on_rank(
        partial(task_of, model, size, False), options.variants.split(","), options.steps, "cpu", {}
    )
    if os.environ["RANK"] == "0":
        Path(folder, "found.json").write_text(json.dumps(asdict(found)))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", default="2,4")
    parser.add_argument("--ranks", default="2", help="of a host")
    parser.add_argument("--rates", default="1gbit,10gbit", help="of a link, as tc writes them")
    parser.add_argument("--delay", type=float, default=1.0, help="ms there and back; 0: none")
    parser.add_argument("--models", default="small-mlp", help=f"some of {', '.join(CASES)}")
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--on-rank", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.on_rank is not None:
        on_rank(options.on_rank, options.models, options)
        return
    check_writable(options.json, "--json")
    if reason := namespaces.why_not():
        parser.error(reason)
    every = []
    for hosts in map(int, options.hosts.split(",")):
        for ranks in map(int, options.ranks.split(",")):
            for rate in options.rates.split(","):
                for model in options.models.split(","):
                    every.append(compare(hosts, ranks, rate, model, options))
                    print(steps.text(every[-1]), end="\n\n", flush=True)
    write_json(options.json, {"hosts": [found.as_json() for found in every]})
    sys.exit(1 if any(found.wrong for found in every) else 0)


if __name__ == "__main__":
    main()
