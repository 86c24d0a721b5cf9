"""What a rank holds of a profiled task in each layout, and in which order they are shown."""

from __future__ import annotations

import pytest

from lockstep.collectives.network import Network
from lockstep.config.parallelism import Parallelism
from lockstep.tools.plan import task_layouts
from lockstep.tools.plan.connection import PlanNetwork
from lockstep.tools.plan.curve import Question
from lockstep.tools.plan.of_task import PlanScaling
from lockstep.tools.plan.task_layouts import TaskLayout, describe, layouts_of
from tests.tools.timing.profiles import profile

JOINED = PlanNetwork(network=Network.flat(0.0, 1e6), words="")


def found(workers: int = 8, method: Parallelism | None = None) -> list[TaskLayout]:
    return layouts_of(
        profile(),
        Question(workers=(1, workers), scaling=PlanScaling(base=1), method=method or Parallelism()),
        JOINED,
    )


def test_who_holds_what() -> None:
    held = {each.name: each for each in found()}
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
    steps = [each.step_ms for each in found()]
    assert steps == sorted(steps)
    monkeypatch.setattr(task_layouts, "memory_of_a_rank", lambda ranks: 4e6)
    small = found()
    assert [each.fits for each in small] == [True, True, False]
    assert small[2].name == "replicated"
    assert (
        describe(small, 8)
        .splitlines()[-1]
        .endswith("does not fit into the memory of a host like this")
    )


def test_the_ranks_of_the_base_need_not_fill_the_mesh() -> None:
    asked = Question(workers=(2, 8), scaling=PlanScaling(base=2), method=Parallelism())
    assert layouts_of(profile(), asked, JOINED) == found()


def test_where_there_is_nothing_to_choose() -> None:
    assert found(workers=1) == []
    assert found(method=Parallelism(compress="bf16")) == []
    assert describe([], 1) == ""
