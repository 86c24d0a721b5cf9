"""python -m tests.simulation [PROTOCOL ...] [--seeds N] | PROTOCOL --seed N"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor

from tests.simulation.seeds import Scenario, failure, first_failure

PROTOCOLS = ("checkpoints", "claims", "preemption", "rendezvous")
_AT_ONCE = 2000  # seeds


def scenario(name: str) -> Scenario:
    found: Scenario = getattr(importlib.import_module(f"tests.simulation.test_{name}"), name)
    return found


def some(name: str, seeds: range) -> tuple[int, str]:
    return first_failure(scenario(name), seeds)


def main() -> None:
    options = argparse.ArgumentParser(prog="python -m tests.simulation")
    options.add_argument("protocols", nargs="*", default=PROTOCOLS, metavar="PROTOCOL")
    options.add_argument("--seeds", type=int, default=10_000, help="of each protocol")
    options.add_argument("--seed", type=int, help="replay this one, and print its operations")
    asked = options.parse_args()
    if asked.seed is not None:
        for name in asked.protocols:
            print(failure(scenario(name), asked.seed) or f"seed {asked.seed} of {name}: no fault")
        return
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for name in asked.protocols:
            begin, seeds = time.perf_counter(), range(asked.seeds)
            chunks = [seeds[first : first + _AT_ONCE] for first in seeds[::_AT_ONCE]]
            for seed, why in pool.map(some, [name] * len(chunks), chunks):
                if seed >= 0:
                    sys.exit(why)
            rate = asked.seeds / (time.perf_counter() - begin)
            print(f"{name}: {asked.seeds:,} seeds without a violation, {rate:,.0f} a second")


if __name__ == "__main__":
    main()
