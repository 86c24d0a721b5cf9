"""Ways that take turns are all timed, and the slowest rank's time counts."""

from __future__ import annotations

import time

from lockstep.testing import run_ranks
from lockstep.tools.timing.in_turns import take_turns
from lockstep.world.world import World


def turns(world: World) -> tuple[dict[str, list[float]], list[str]]:
    order: list[str] = []

    def quick() -> None:
        order.append("quick")

    def slow_on_last() -> None:
        order.append("slow")
        time.sleep(0.05 * world.rank)

    return take_turns({"quick": quick, "slow": slow_on_last}, 4, world, warm_up=1), order


def test_the_slowest_rank_counts_and_the_order_turns_round() -> None:
    for size in (1, 3):
        ranks = run_ranks(turns, size)
        found, order = ranks[0]
        assert all(each == ranks[0] for each in ranks)
        assert [len(found[name]) for name in ("quick", "slow")] == [4, 4]
        assert min(found["slow"]) >= 0.05 * (size - 1)
        assert order == ["quick", "slow", "slow", "quick"] * 2 + ["quick", "slow"]


def test_without_turns_there_is_no_time() -> None:
    assert run_ranks(none, 1) == [{"way": []}]


def none(world: World) -> dict[str, list[float]]:
    return take_turns({"way": lambda: None}, 0, world)
