"""Many simulations of one scenario, and a report of the first that fails."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable

import pytest

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
        title = f"seed {seed} of {scenario.__module__}: the last {len(trace)} operations"
        disk = ["on the disk:", *machine.disk.everything()]
        return "\n".join([title, *trace, *disk, traceback.format_exc()])
    return ""


def first_failure(scenario: Scenario, seeds: Iterable[int]) -> tuple[int, str]:
    """The first seed that fails, and why; (-1, "") where none does."""
    with threads():
        for seed in seeds:
            if why := failure(scenario, seed):
                return seed, why
    return -1, ""


def tiers(few: int, all_of_them: int) -> pytest.MarkDecorator:
    """Have a test take `seeds`: few in the fast tier, and the others in the rest."""
    others = pytest.param(range(few, all_of_them), marks=pytest.mark.rest, id="others")
    return pytest.mark.parametrize("seeds", [pytest.param(range(few), id="few"), others])


def assert_no_failure(scenario: Scenario, seeds: Iterable[int]) -> None:
    seed, why = first_failure(scenario, seeds)
    assert seed == -1, why


def assert_found(scenario: Scenario, within: int, words: str) -> None:
    """One of that many seeds shows the fault that was planted, in these words."""
    with threads():
        failures = (failure(scenario, seed) for seed in range(within))
        assert any(words in why.splitlines()[-1] for why in failures if why)
