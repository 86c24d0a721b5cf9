"""Ways that take turns are all timed, and the slowest rank's time counts."""

from __future__ import annotations

import time

from lockstep.tools.timing.in_turns import take_turns
from lockstep.world.world import World
from tests.teams import on_team


def turns(world: World) -> tuple[dict[str, list[float]], dict[str, list[float]], list[str]]:
    order: list[str] = []

    def quick() -> None:
        order.append("quick")

    def slow_on_last() -> None:
        order.append("slow")
        time.sleep(0.05 * world.rank)

    times = take_turns({"quick": quick, "slow": slow_on_last}, 4, world, warm_up=1)
    return times, take_turns({"way": lambda: None}, 0, world), order


def test_the_slowest_rank_counts_and_the_order_turns_round() -> None:
    for size in (1, 3):
        ranks = on_team(turns, size)
        found, none, order = ranks[0]
        assert all(each == ranks[0] for each in ranks)
        assert [len(found[name]) for name in ("quick", "slow")] == [4, 4]
        assert min(found["slow"]) >= 0.05 * (size - 1)
        assert order == ["quick", "slow", "slow", "quick"] * 2 + ["quick", "slow"]
        assert none == {"way": []}
