"""Whether the variant that `lockstep bench train` names is the fastest one in a second run too.

    python benchmarks/fastest.py --workers 2 --models small-mlp --tries 10
    python benchmarks/fastest.py --workers 2 --models digits --steps 100 --tries 10

Each try measures twice. The first run chooses a variant that `lockstep train` can run; in the second one
no variant of all may be faster by 2 % or more. Run it on a quiet machine.
"""

from __future__ import annotations

import argparse
from functools import partial

import lockstep
from cases import CASES, task_of
from lockstep.runs import Settings, load_task
from lockstep.tools.bench.training_step import StepComparison, measure


def task(name: str, workers: int) -> lockstep.Task:
    if name in CASES:
        return task_of(name, workers, compiled=False)
    return load_task(Settings(task=name))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument(
        "--models", default="digits,small-mlp", help=f"tasks, or {', '.join(CASES)}"
    )
    parser.add_argument("--tries", type=int, default=10)
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    for name in options.models.split(","):
        right = sum(tried(name, options) for _ in range(options.tries))
        print(f"{name}: the fastest again in {right} of {options.tries} tries", flush=True)


def tried(name: str, options: argparse.Namespace) -> bool:
    """Measure twice; whether the second run agrees with the first."""

    def run() -> StepComparison:
        settings = Settings(task=name, workers=options.workers, device="cpu")
        return measure(partial(task, name, options.workers), settings, steps=options.steps)

    chosen = run().fastest
    rows = run().rows
    assert chosen is not None
    again = next(
        row for row in rows if (row.variant, row.threads) == (chosen.variant, chosen.threads)
    )
    slower = 100 * (rows[0].ratio(again) - 1)
    print(f"  {chosen}: {slower:.1f} % slower than {rows[0]}", flush=True)
    return again.level_with(rows[0])


if __name__ == "__main__":
    main()
