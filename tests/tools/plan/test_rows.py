"""A row for each number of ranks."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import partial

import pytest

from lockstep.runs import Settings
from lockstep.schedules.network import Link, Network
from lockstep.tools.plan.forecast import Forecast, describe, forecasts
from lockstep.tools.plan.profile import Profile
from lockstep.tools.plan.work import PlanScaling, given_work, work_of
from tests.tools.plan.profiles import ALONE, profile

FREE = Network.flat(0.0, math.inf)
QUICK = replace(ALONE, spread=0.0, optimizer=0.0, other=0.0, loading=0.0)
STEADY = profile(sides={1: QUICK})
PLAIN = Settings(task="digits")


def planned(
    *workers: int,
    network: Network = FREE,
    weak: bool = False,
    method: Settings = PLAIN,
    of: Profile = STEADY,
    per_host: int = 1,
) -> list[Forecast]:
    base = min(workers) if len(workers) > 1 else 1
    scaling = PlanScaling(base=base, weak=weak, per_host=per_host)
    return forecasts(partial(work_of, of, scaling), workers, base, network, method)


def test_without_a_network_nothing_is_lost() -> None:
    rows = planned(4, 1, 8, 2)
    assert [row.workers for row in rows] == [1, 2, 4, 8]
    assert [row.step for row in rows] == [24, 12, 6, 3]
    last = json.loads(json.dumps(rows[3].as_json()))
    assert (last["step_ms"], last["efficiency"], last["limiting"]) == (3000, 1, "computation")
    assert [row.efficiency for row in planned(2, 64, weak=True)] == pytest.approx([1, 1])


def test_more_ranks_than_micro_batches() -> None:
    rows = planned(1, 8, 16)
    assert [row.efficiency for row in rows] == pytest.approx([1, 1, 0.5])
    note = "a step has 8 micro-batches: among 16 ranks some have none"
    assert note in "\n".join(PlanScaling(base=1).notes([1, 8, 16], STEADY.slots))
    weak = PlanScaling(base=1, weak=True)
    assert note not in "\n".join(weak.notes([1, 16], STEADY.slots))


def test_the_base_is_the_smallest_and_of_one_number_a_rank_alone() -> None:
    slow = Network.flat(0.0, 1e5)
    several, single = planned(4, 8, network=slow), planned(8, network=slow)
    assert several[0].efficiency == 1
    assert 0 < single[0].efficiency < several[1].efficiency < 1


def test_on_cpus_auto_is_what_lockstep_train_would_take() -> None:
    network = Network(Link(0.0, 1e9), Link(0.0, 1e5), 4)
    auto, native, hierarchical = (
        planned(8, network=network, method=Settings(task="digits", reduce=reduce))[0].step
        for reduce in ("auto", "native", "hierarchical")
    )
    assert auto == min(native, hierarchical)


def test_messages_take_the_time_of_the_software_however_quick_the_network_is() -> None:
    quick = Network.flat(1e-9, 1e15)
    slow = profile(messages={2: 0.5, 4: 4.0}, sides={1: QUICK, 2: replace(QUICK, ranks=2)})
    rows = planned(2, 4, network=quick, of=slow, per_host=4)
    # behind a backward of 2 s, and of 4, in which the facts are under way
    assert [row.parts["network"] for row in rows] == pytest.approx([0.5, 8.0])
    own = planned(2, 4, network=quick, of=slow)
    # a host each: as two that are alone
    assert [row.parts["network"] for row in own] == pytest.approx([0.5, 0.5])
    assert [row.parts["network"] for row in planned(2, 4, of=slow)] == [0, 0]


def test_a_step_of_three_numbers() -> None:
    work = given_work(94, 3, 30)
    assert sum(bucket.elements for bucket in work.buckets) == 23_500_000
    assert [bucket.elements for bucket in work.buckets] == [7_833_334, 7_833_333, 7_833_333]
    assert [bucket.ready for bucket in work.buckets] == pytest.approx([1 / 3, 2 / 3, 1])
    rows = forecasts(lambda workers: work, [4, 8], 1, Network.flat(0.0, 1e9), PLAIN)
    for row in rows:
        assert row.efficiency == pytest.approx(0.03 / row.step)
        assert row.samples_per_s is None
    assert "samples/s" in describe(rows)
