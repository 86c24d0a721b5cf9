"""python -m tests.simulation [PROTOCOL ...] [--seeds N] [--first N] | PROTOCOL --seed N"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from itertools import islice

from tests.simulation.seeds import Scenario, failure, first_failure

PROTOCOLS = ("checkpoints", "claims", "restarts", "preemption", "rendezvous")
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
    options.add_argument("--first", type=int, default=0, help="the first of them")
    options.add_argument("--seed", type=int, help="replay this one, and print its operations")
    asked = options.parse_args()
    if asked.seed is not None:
        for name in asked.protocols:
            print(failure(scenario(name), asked.seed) or f"seed {asked.seed} of {name}: no fault")
        return
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for name in asked.protocols:
            begin, last = time.perf_counter(), asked.first + asked.seeds
            chunks = [
                range(first, min(first + _AT_ONCE, last))
                for first in range(asked.first, last, _AT_ONCE)
            ]
            found = pool.map(some, [name] * len(chunks), chunks)
            for _, why in islice((each for each in found if each[0] >= 0), 1):
                sys.exit(why)
            rate = asked.seeds / (time.perf_counter() - begin)
            print(f"{name}: {asked.seeds:,} seeds without a violation, {rate:,.0f} a second")


if __name__ == "__main__":
    main()
