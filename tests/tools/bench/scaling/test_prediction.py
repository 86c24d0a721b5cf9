"""Steps foretold from one rank alone and a link."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lockstep.collectives.network import Link
from lockstep.config.parallelism import Parallelism
from lockstep.gradients.facts import numbers
from lockstep.tools.bench.scaling.prediction import Carried, link_in
from lockstep.tools.bench.scaling.prediction import step_seconds as seconds_of
from lockstep.tools.timing.hockney import Fit, fit
from lockstep.tools.timing.profile import Leaves

SLOW = Carried(
    buckets=[Leaves(ready=1.0, elements=250_000)],
    width=4,
    buffers=0,
    link=Link(1e-3, 1e8),
    overlaps=False,
)  # 1 MB: 10 ms through a link


def step_seconds(known: Carried, *, cores: int | None = None, **step: Any) -> float:
    return seconds_of(known, Parallelism(), cores=cores, **step)


def test_one_worker_computes_and_sends_nothing() -> None:
    assert step_seconds(SLOW, workers=1, alone=0.3, micro_batches=4, threads=1) == 0.3


def test_what_does_not_overlap_is_added_whole() -> None:
    """Gradients and the facts of a step; each in 2(n-1) messages, and the gradients' bytes
    2(n-1)/n times.
    """
    two = step_seconds(SLOW, workers=2, alone=0.3, micro_batches=4, threads=1)
    assert two == pytest.approx(0.3 + 2 * 2e-3 + 0.01)
    four = step_seconds(SLOW, workers=4, alone=0.1, micro_batches=2, threads=1)
    assert four == pytest.approx(0.1 + 2 * 6e-3 + 0.015)
    moved = step_seconds(
        replace(SLOW, buffers=100), workers=2, alone=0.3, micro_batches=4, threads=1
    )
    assert moved == pytest.approx(two + 2e-3)  # BatchNorm's statistics are a small message more


def test_what_travels_behind_the_backward_is_hidden_but_for_the_last_bucket() -> None:
    halves = [Leaves(ready=0.5, elements=125_000), Leaves(ready=1.0, elements=125_000)]
    hidden = replace(SLOW, overlaps=True, buckets=halves, link=Link(0.0, 1e8))
    assert step_seconds(hidden, workers=2, alone=0.3, micro_batches=1, threads=1) == pytest.approx(
        0.3 + 0.005, rel=1e-4
    )
    # of three micro-batches the last backward, 2/3 of a third, is what gradients travel behind;
    # here too short for the first bucket
    short = step_seconds(hidden, workers=2, alone=0.009, micro_batches=3, threads=1)
    assert short == pytest.approx(0.009 - 0.001 + 0.01, rel=1e-3)


def test_facts_travel_whole() -> None:
    """Two ranks send all of a message once; where nothing is computed, nothing hides it."""
    told = replace(SLOW, overlaps=True, buckets=[], link=Link(0.0, 1.0))
    assert step_seconds(told, workers=2, alone=0.0, micro_batches=1, threads=1) == pytest.approx(
        8 * numbers(2)
    )


def test_ranks_that_share_a_core_take_turns_on_it() -> None:
    free = replace(SLOW, link=None)
    assert step_seconds(
        free, workers=4, alone=0.1, micro_batches=1, threads=1, cores=4
    ) == pytest.approx(0.1)
    assert step_seconds(
        free, workers=8, alone=0.1, micro_batches=1, threads=1, cores=4
    ) == pytest.approx(0.2)
    assert step_seconds(
        free, workers=4, alone=0.1, micro_batches=1, threads=2, cores=4
    ) == pytest.approx(0.2)
    assert step_seconds(free, workers=8, alone=0.1, micro_batches=1, threads=1) == pytest.approx(
        0.1
    )


@pytest.mark.parametrize("workers", [2, 4])
def test_a_link_is_found_again_from_its_all_reduces(workers: int) -> None:
    true, sizes = Link(50e-6, 1e9), (2**12, 2**22)
    found = link_in(
        fit(
            [
                (1, size, 2 * (workers - 1) * (true.latency + size / workers / true.bandwidth))
                for size in sizes
            ]
        ),
        workers,
    )
    assert found.latency == pytest.approx(true.latency)
    assert found.bandwidth == pytest.approx(true.bandwidth)


def test_noise_leaves_a_link_that_costs_nothing_rather_than_one_that_pays() -> None:
    assert link_in(fit([(1, 2**12, 2e-3), (1, 2**22, 1e-3)]), 2).bandwidth == float("inf")
    assert link_in(Fit(0.0, 1.0, 0.0), 2).latency == 0
