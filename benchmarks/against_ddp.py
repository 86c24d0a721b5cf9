"""One training step against torch's DistributedDataParallel, Accelerate's and Fabric's, in turns,
in one run, on the same ranks.

    python benchmarks/against_ddp.py --workers 2 --models small-mlp,small-mlp128,cnn4,transformer
    python benchmarks/against_ddp.py --workers 4 --models small-mlp,cnn4 --json four.json
    python benchmarks/against_ddp.py --device cuda --workers 1

What is measured, and how, is in steps.py and baselines.py;
the models are those of cases.py. DDP has gradient_as_bucket_view and buckets of 5, 25 and 100 MB;
every way the same fused optimizer. Lockstep's ways: its DistributedDataParallel and its Stepper,
over native collectives and through shared memory, with a sharded update, and with that and one copy
of the weights. "local" does not communicate: on one rank it is the bare loop. `--compile` compiles
every model; `--memory` measures peak memory too, of each way in ranks of its own.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import rivals
import steps
from cases import CASES, task_of
from lockstep.errors import UsageError
from lockstep.tools.timing.output_files import check_writable, write_json
from steps import BASELINES, measure

VARIANTS = (
    *BASELINES,
    *rivals.WRAPPERS,
    "wrapper:native",
    "wrapper:shared",
    "stepper:native",
    "stepper:shared",
    "stepper:sharded",
    "stepper:weights",
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument(
        "--models",
        default="small-mlp,small-mlp128,cnn4,transformer",
        help=f"some of {', '.join(CASES)}",
    )
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    names = options.models.split(",")
    if unknown := [name for name in names if name not in CASES]:
        parser.error(f"--models {','.join(unknown)}: choose some of {', '.join(CASES)}")
    try:
        wrong = compare(names, options)
    except UsageError as error:
        parser.error(str(error))
    sys.exit(1 if wrong else 0)


def compare(names: list[str], options: argparse.Namespace) -> bool:
    """Measure, print and write; whether some way trained something else."""
    check_writable(options.json, "--json")
    every = []
    variants = options.variants.split(",")
    left_out = rivals.left_out(variants, "fp32")
    for name in names:
        found = measure(
            partial(task_of, name, options.workers, options.compile),
            workers=options.workers,
            variants=[variant for variant in variants if variant not in left_out],
            steps=options.steps,
            device=options.device,
            memory=options.memory,
            others=rivals.WRAPPERS,
        )
        every.append(replace(found, left_out={**left_out, **found.left_out}))
        print(steps.text(every[-1]), end="\n\n", flush=True)
    write_json(
        options.json,
        {"models": [found.as_json() for found in every], "versions": rivals.versions()},
    )
    return any(found.wrong for found in every)


if __name__ == "__main__":
    main()
