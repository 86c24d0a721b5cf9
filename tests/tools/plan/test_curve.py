"""Rows of a curve: efficiency against the base, idle ranks, meshes, and 65,536 ranks."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest

from lockstep.collectives.network import Link, Network
from lockstep.config.mesh import Mesh
from lockstep.config.parallelism import Parallelism
from lockstep.errors import UsageError
from lockstep.tools.plan.connection import PlanNetwork
from lockstep.tools.plan.curve import Curve, Question, curve, describe
from lockstep.tools.plan.goodput import Failures
from lockstep.tools.plan.of_task import PlanScaling
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
    ("workers", "mesh", "message"),
    [
        (
            (1, 6, 8, 9),
            Mesh(shard=4),
            (
                "--mesh shard=4 with --workers 6,9: shard takes 4 ranks; give multiples of 4, such"
                " as --workers 4,8, or 1"
            ),
        ),
        ((2, 8), Mesh(shard=8), "--mesh shard=8 with --workers 2: shard takes 8 ranks"),
        (
            (1, 2),
            Mesh(pipeline=2),
            (
                "--mesh pipeline=2 with the plan of a task: no profile says what goes from layer to"
                " layer; give data and shard"
            ),
        ),
        (
            (1, 4),
            Mesh(data=2, tensor=2),
            (
                "--mesh data=2,tensor=2 with the plan of a task: .*, or --model and --device in"
                " place of the task"
            ),
        ),
    ],
)
def test_a_mesh_that_cannot_be_planned_is_no_question(
    workers: tuple[int, ...], mesh: Mesh, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        Question(
            workers=workers, scaling=PlanScaling(base=workers[0]), method=Parallelism(mesh=mesh)
        )


def test_neither_is_a_base_beside_the_mesh() -> None:
    with pytest.raises(UsageError, match="--workers 2: shard takes 8 ranks"):
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
