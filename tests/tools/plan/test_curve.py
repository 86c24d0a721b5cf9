"""A row for each number of ranks; what failures take of a training's time; the ways to lay a task
out.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from lockstep.collectives.network import Link, Network
from lockstep.config.mesh import Mesh
from lockstep.config.parallelism import Parallelism
from lockstep.tools.plan.curve import (
    Curve,
    Failures,
    Question,
    TaskLayout,
    curve,
    describe,
    describe_layouts,
    goodput,
    layouts_of,
    share_of_work,
)
from lockstep.tools.plan.networks import PlanNetwork
from lockstep.tools.plan.work import PlanScaling
from tests.refused import refused
from tests.tools.timing.profiles import ALONE, profile

FREE = Network.flat(0.0, math.inf)
STEADY = profile(sides=(replace(ALONE, spread=0.0, optimizer=0.0, other=0.0, loading=0.0),))


def found(*workers: int, network: Network = FREE, weak: bool = False, **changes: Any) -> Curve:
    scaling = PlanScaling(base=workers[0] if len(workers) > 1 else 1, weak=weak)
    asked = Question(workers=workers, scaling=scaling, **{"method": Parallelism(), **changes})
    return curve(STEADY, asked, PlanNetwork(network=network, words=""))


def test_without_a_network_nothing_is_lost() -> None:
    rows = found(1, 2, 4, 8).rows
    assert [row.efficiency for row in rows] == pytest.approx([1, 1, 1, 1])
    assert [row.predicted.step for row in rows] == [24, 12, 6, 3]
    assert [row.efficiency for row in found(2, 64, weak=True).rows] == pytest.approx([1, 1])


def test_more_ranks_than_micro_batches() -> None:
    idle = found(1, 8, 16)
    assert [row.efficiency for row in idle.rows] == pytest.approx([1, 1, 0.5])
    assert idle.idle_from == 16
    assert "a step has 8 micro-batches: among 16 ranks some have none" in describe(idle)
    assert found(1, 16, weak=True).idle_from is None


def test_the_base_is_the_smallest_and_of_one_number_a_rank_alone() -> None:
    slow = Network.flat(0.0, 1e5)
    several, single = found(4, 8, network=slow), found(8, network=slow)
    assert several.rows[0].efficiency == 1
    assert 0 < single.rows[0].efficiency < several.rows[1].efficiency < 1


def test_the_link_takes_over() -> None:
    rows = found(1, 2, 4, 8, network=Network.flat(0.0, 2e5)).rows  # ten seconds for two
    assert [row.predicted.limiting for row in rows] == [
        "computation",
        "computation",
        "network",
        "network",
    ]
    assert [row.efficiency for row in rows] == sorted(
        (row.efficiency for row in rows), reverse=True
    )


def test_a_mesh_takes_the_ranks_that_are_left_for_data() -> None:
    rows = found(1, 4, 8, method=Parallelism(mesh=Mesh(shard=4))).rows
    assert [row.predicted.step for row in rows] == pytest.approx([24, 6, 3])


@pytest.mark.parametrize(
    ("workers", "mesh", "code", "values"),
    [
        ((1, 6, 8, 9), Mesh(shard=4), "mesh-workers", {"workers": [6, 9], "others": 4}),
        ((2, 8), Mesh(shard=8), "mesh-workers", {"workers": [2], "others": 8}),
        ((1, 2), Mesh(pipeline=2), "mesh-not-planned", {"what": "a task"}),
        ((1, 4), Mesh(data=2, tensor=2), "mesh-not-planned", {"what": "a task"}),
    ],
)
def test_a_mesh_that_cannot_be_planned_is_no_question(
    workers: tuple[int, ...], mesh: Mesh, code: str, values: dict[str, Any]
) -> None:
    with refused(code, mesh=str(mesh), **values):
        Question(
            workers=workers, scaling=PlanScaling(base=workers[0]), method=Parallelism(mesh=mesh)
        )


def test_neither_is_a_base_beside_the_mesh() -> None:
    with refused("mesh-workers", workers=[2], others=8):
        Question(workers=(8,), scaling=PlanScaling(base=2), method=Parallelism(mesh=Mesh(shard=8)))


def test_on_cpus_auto_is_what_lockstep_train_would_take() -> None:
    network = Network(Link(0.0, 1e9), Link(0.0, 1e5), 4)
    auto, native, hierarchical = (
        found(8, network=network, method=Parallelism(reduce=reduce)).rows[0].predicted.step
        for reduce in ("auto", "native", "hierarchical")
    )
    assert auto == min(native, hierarchical)


def test_goodput_falls_with_the_ranks() -> None:
    rows = found(1, 1024, failures=Failures(mtbf=3600 * 1e4, checkpoint=10.0, restart=60.0)).rows
    shares = [row.goodput.share for row in rows if row.goodput]
    assert 1 > shares[0] > shares[1] > 0.5
    assert {"goodput", "checkpoint_interval_s"} <= set(rows[0].as_json())


def test_json_is_in_order_of_workers() -> None:
    rows = json.loads(json.dumps([row.as_json() for row in found(4, 1, 2).rows]))
    assert [row["workers"] for row in rows] == [1, 2, 4]
    assert rows[2]["step_ms"] == 6000
    assert rows[2]["efficiency"] == 1
    assert rows[2]["limiting"] == "computation"
    assert rows[2]["low_ms"] <= rows[2]["step_ms"] <= rows[2]["high_ms"]


@pytest.mark.parametrize(
    "method",
    [
        Parallelism(),
        Parallelism(compress="bf16"),
        Parallelism(sync_every=8),
        Parallelism(mesh=Mesh(shard=8)),
        Parallelism(reduce="central"),
    ],
)
def test_65536_ranks_are_planned(method: Parallelism) -> None:
    network = Network(Link(5e-6, 1e10), Link(25e-6, 1e9), 8)
    last = found(1, 65_536, network=network, weak=True, method=method).rows[-1]
    assert 0 < last.efficiency < 1


def test_messages_take_the_time_of_the_software_however_quick_the_network_is() -> None:
    quick = PlanNetwork(network=Network.flat(1e-9, 1e15), words="")
    slow = replace(STEADY, messages={2: 0.5, 4: 4.0})
    asked = Question(
        workers=(2, 4), scaling=PlanScaling(base=2, per_host=None), method=Parallelism()
    )
    sides = (STEADY.sides[0], replace(STEADY.sides[0], ranks=2))
    found = curve(replace(slow, sides=sides), asked, quick).rows
    assert [row.predicted.exposed for row in found] == pytest.approx(
        [0.5, 8.0]
    )  # behind a backward of 2 s, and of 4, in which the facts are under way
    own = curve(slow, replace(asked, scaling=PlanScaling(base=2)), quick).rows
    # a host each: as two that are alone
    assert [row.predicted.exposed for row in own] == pytest.approx([0.5, 0.5])
    with refused("profile-lacks-ranks", known="2, 4", ranks=8):
        curve(
            replace(slow, sides=sides),
            replace(asked, workers=(8,), scaling=PlanScaling(base=2, per_host=None)),
            quick,
        )


DAY = Failures(mtbf=24 * 3600.0, checkpoint=20.0, restart=60.0)


def test_hardly_any_failure_costs_hardly_any_time() -> None:
    found = goodput(Failures(mtbf=1e12, checkpoint=1.0, restart=0.0), 1)
    assert found.share == pytest.approx(1, abs=1e-5)
    assert found.interval == pytest.approx(math.sqrt(2 * 1e12), rel=1e-3)  # Young's


def test_checkpoints_alone() -> None:
    assert share_of_work(
        Failures(mtbf=1e15, checkpoint=10.0, restart=0.0), 1, 90.0
    ) == pytest.approx(0.9, rel=1e-3)


@pytest.mark.parametrize("workers", [1, 16, 512])
def test_no_other_interval_is_better(workers: int) -> None:
    best = goodput(DAY, workers)
    for factor in (0.5, 0.8, 1.25, 2.0):
        assert share_of_work(DAY, workers, factor * best.interval) <= best.share + 1e-4


def test_more_ranks_fail_more_often_and_save_more_often() -> None:
    found = [goodput(DAY, workers) for workers in (1, 16, 256, 4096)]
    assert [each.share for each in found] == sorted((each.share for each in found), reverse=True)
    assert [each.interval for each in found] == sorted(
        (each.interval for each in found), reverse=True
    )
    assert goodput(DAY, 2**20).share == 0.0  # a failure every 80 ms: nothing is ever saved


def test_a_training_that_is_thrown_down_at_random() -> None:
    rng = np.random.default_rng(0)
    mtbf, interval, segments = DAY.mtbf / 64, 600.0, 4000
    clock = 0.0
    for _ in range(segments):
        while (fails := rng.exponential(mtbf)) < interval + DAY.checkpoint:
            clock += fails
            while (again := rng.exponential(mtbf)) < DAY.restart:
                clock += again
            clock += DAY.restart
        clock += interval + DAY.checkpoint
    assert share_of_work(DAY, 64, interval) == pytest.approx(segments * interval / clock, rel=0.02)


JOINED = PlanNetwork(network=Network.flat(0.0, 1e6), words="")


def laid_out(workers: int = 8, method: Parallelism | None = None) -> list[TaskLayout]:
    return layouts_of(
        profile(),
        Question(workers=(1, workers), scaling=PlanScaling(base=1), method=method or Parallelism()),
        JOINED,
    )


def test_who_holds_what() -> None:
    held = {each.name: each for each in laid_out()}
    assert held["replicated"].total == pytest.approx(5e6)
    assert held["update sharded"].optimizer == 2e6 / 8
    assert held["update sharded"].weights == 1e6
    sharded = held["mesh shard=8"]
    # of two buckets both are whole at times
    assert (sharded.gradients, sharded.optimizer) == (1e6, 2e6 / 8)
    assert {each.activations for each in held.values()} == {1e6}


def test_those_that_fit_come_first_and_of_them_the_quickest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps = [each.step_ms for each in laid_out()]
    assert steps == sorted(steps)
    monkeypatch.setattr("lockstep.tools.plan.curve.memory_of_a_rank", lambda ranks: 4e6)
    small = laid_out()
    assert [each.fits for each in small] == [True, True, False]
    assert small[2].name == "replicated"
    assert (
        describe_layouts(small, 8)
        .splitlines()[-1]
        .endswith("does not fit into the memory of a host like this")
    )


def test_the_ranks_of_the_base_need_not_fill_the_mesh() -> None:
    asked = Question(workers=(2, 8), scaling=PlanScaling(base=2), method=Parallelism())
    assert layouts_of(profile(), asked, JOINED) == laid_out()


def test_where_there_is_nothing_to_choose() -> None:
    assert laid_out(workers=1) == []
    assert laid_out(method=Parallelism(compress="bf16")) == []
    assert describe_layouts([], 1) == ""
