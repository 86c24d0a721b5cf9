"""A row for each number of ranks."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from lockstep.config.parallelism import Parallelism
from lockstep.schedules.network import Link, Network
from lockstep.tools.plan.curve import PlanRow, describe, plan_rows
from lockstep.tools.plan.work import PlanScaling
from tests.tools.timing.profiles import ALONE, profile

FREE = Network.flat(0.0, math.inf)
STEADY = profile(sides=(replace(ALONE, spread=0.0, optimizer=0.0, other=0.0, loading=0.0),))


def scaling_of(*workers: int, weak: bool = False) -> PlanScaling:
    return PlanScaling(base=min(workers) if len(workers) > 1 else 1, weak=weak)


def planned(
    *workers: int, network: Network = FREE, weak: bool = False, method: Parallelism | None = None
) -> list[PlanRow]:
    scaling = scaling_of(*workers, weak=weak)
    return plan_rows(STEADY, workers, scaling, network, method or Parallelism())


def test_without_a_network_nothing_is_lost() -> None:
    rows = planned(4, 1, 8, 2)
    assert [row.workers for row in rows] == [1, 2, 4, 8]
    assert [row.predicted.step for row in rows] == [24, 12, 6, 3]
    last = json.loads(json.dumps(rows[3].as_json()))
    assert (last["step_ms"], last["efficiency"], last["limiting"]) == (3000, 1, "computation")
    assert [row.efficiency for row in planned(2, 64, weak=True)] == pytest.approx([1, 1])


def test_more_ranks_than_micro_batches() -> None:
    rows = planned(1, 8, 16)
    assert [row.efficiency for row in rows] == pytest.approx([1, 1, 0.5])
    note = "a step has 8 micro-batches: among 16 ranks some have none"
    assert note in describe(rows, STEADY, scaling_of(1, 8, 16))
    weak = scaling_of(1, 16, weak=True)
    assert note not in describe(planned(1, 16, weak=True), STEADY, weak)


def test_the_base_is_the_smallest_and_of_one_number_a_rank_alone() -> None:
    slow = Network.flat(0.0, 1e5)
    several, single = planned(4, 8, network=slow), planned(8, network=slow)
    assert several[0].efficiency == 1
    assert 0 < single[0].efficiency < several[1].efficiency < 1


def test_on_cpus_auto_is_what_lockstep_train_would_take() -> None:
    network = Network(Link(0.0, 1e9), Link(0.0, 1e5), 4)
    auto, native, hierarchical = (
        planned(8, network=network, method=Parallelism(reduce=reduce))[0].predicted.step
        for reduce in ("auto", "native", "hierarchical")
    )
    assert auto == min(native, hierarchical)


def test_messages_take_the_time_of_the_software_however_quick_the_network_is() -> None:
    quick = Network.flat(1e-9, 1e15)
    sides = (STEADY.sides[0], replace(STEADY.sides[0], ranks=2))
    slow = replace(STEADY, messages={2: 0.5, 4: 4.0}, sides=sides)
    one_host = PlanScaling(base=2, per_host=4)
    rows = plan_rows(slow, (2, 4), one_host, quick, Parallelism())
    # behind a backward of 2 s, and of 4, in which the facts are under way
    assert [row.predicted.exposed for row in rows] == pytest.approx([0.5, 8.0])
    own = plan_rows(slow, (2, 4), PlanScaling(base=2), quick, Parallelism())
    # a host each: as two that are alone
    assert [row.predicted.exposed for row in own] == pytest.approx([0.5, 0.5])
