"""Many simulations of one scenario, and a report of the first that fails."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable

from tests.simulation.machine import Machine, threads

Scenario = Callable[[Machine], None]
_SHOWN = 400  # operations


def failure(scenario: Scenario, seed: int) -> str:
    """What is wrong with this seed, with its operations; "" for nothing."""
    machine = Machine(seed)
    try:
        scenario(machine)
    except Exception:
        trace = [" ".join(map(str, each)) for each in machine.trace[-_SHOWN:]]
        return "\n".join(
            [
                f"seed {seed} of {scenario.__module__}: the last {len(trace)} operations",
                *trace,
                "on the disk:",
                *machine.disk.everything(),
                traceback.format_exc(),
            ]
        )
    return ""


def first_failure(scenario: Scenario, seeds: Iterable[int]) -> tuple[int, str]:
    """The first seed that fails, and why; (-1, "") where none does."""
    with threads():
        for seed in seeds:
            if why := failure(scenario, seed):
                return seed, why
    return -1, ""
