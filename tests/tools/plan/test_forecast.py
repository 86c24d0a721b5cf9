"""A simulated step in its limits, where a formula says what must come out, and in what must hold
everywhere.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.runs import Settings
from lockstep.schedules.network import Link, Network
from lockstep.tools.plan.forecast import RankWork, expected_maximum, simulate
from lockstep.tools.plan.profile import GradientBucket
from tests.refused import refused


def settings(**method: Any) -> Settings:
    return Settings(task="step", **method)


FREE = Network.flat(0.0, math.inf)
# a megabyte
ONE = RankWork(
    forward=1.0,
    backward=2.0,
    micro_batches=1,
    buckets=(GradientBucket(ready=1.0, elements=250_000),),
)
TWO = replace(
    ONE,
    buckets=(
        GradientBucket(ready=0.5, elements=250_000),
        GradientBucket(ready=1.0, elements=250_000),
    ),
)


def test_a_rank_alone_takes_what_it_computes() -> None:
    work = replace(
        TWO, micro_batches=3, optimizer=0.5, other=0.25, loading=0.125, buffers=100, facts=100
    )
    found = simulate(work, 1, Network.flat(1.0, 1.0))
    assert (found.step, found.parts["network"], found.sent) == (9.875, 0, 0)
    assert found.parts["computation"] == 9


@pytest.mark.parametrize("workers", [2, 64, 65_536])
def test_without_a_network_only_the_slowest_is_waited_for(workers: int) -> None:
    assert simulate(TWO, workers, FREE).step == 3
    spread = simulate(replace(TWO, spread=0.01), workers, FREE)
    assert spread.step == pytest.approx(3 * (1 + 0.01 * expected_maximum(workers)))
    assert spread.parts["stragglers"] == pytest.approx(spread.step - 3)
    # ranks that take turns on a core are late together
    turns = simulate(replace(TWO, spread=0.01, in_turns=4), 8, FREE)
    assert turns.parts["stragglers"] == pytest.approx(3 * 0.01 / 2 * expected_maximum(2))


def test_the_largest_of_so_many_draws() -> None:
    known = {
        1: 0.0,
        2: 1 / math.sqrt(math.pi),
        3: 1.5 / math.sqrt(math.pi),
        10: 1.5387527308,
        100: 2.5075936364,
    }
    for draws, expected in known.items():
        assert expected_maximum(draws) == pytest.approx(expected, rel=0.05)
    values = [expected_maximum(2**power) for power in range(17)]
    assert values == sorted(values)
    assert 0.9 < values[16] / math.sqrt(2 * math.log(65_536)) < 1


def test_one_bucket_that_is_complete_at_the_end_hides_nothing() -> None:
    for workers in (2, 3, 8):
        found = simulate(ONE, workers, Network.flat(0.001, 1e6))
        ring = 2 * (workers - 1) * 0.001 + 2 * (workers - 1) / workers
        parts = (found.parts["network"], found.communication, found.step)
        assert parts == pytest.approx((ring, ring, 3 + ring))


def test_what_is_complete_early_is_hidden_behind_the_rest() -> None:
    found = simulate(TWO, 2, Network.flat(0.0, 1e6))  # a second each
    assert (found.communication, found.parts["network"]) == (2, 1)
    # two seconds each: the second waits for the first
    slow = simulate(TWO, 2, Network.flat(0.0, 0.5e6))
    assert (slow.communication, slow.parts["network"]) == (4, 3)

    # only the last micro-batch hides anything
    assert (
        simulate(replace(TWO, micro_batches=4), 2, Network.flat(0.0, 0.5e6)).parts["network"] == 3
    )


works = st.builds(
    RankWork,
    forward=st.floats(0, 10),
    backward=st.floats(0, 10),
    micro_batches=st.integers(1, 4),
    optimizer=st.floats(0, 1),
    spread=st.floats(0, 0.2),
    buckets=st.lists(st.tuples(st.floats(0, 1), st.integers(1, 10**6)), min_size=1, max_size=4).map(
        lambda found: tuple(
            GradientBucket(ready=ready, elements=elements) for ready, elements in sorted(found)
        )
    ),
)
methods = st.sampled_from(
    [
        settings(),
        settings(reduce="tree"),
        settings(reduce="central"),
        settings(compress="bf16"),
        settings(sync_every=7),
        settings(update="sharded"),
    ]
)


def nodes_of_four(latency: float, bandwidth: float) -> Network:
    return Network(Link(latency, bandwidth), Link(latency, bandwidth), 4)


@given(works, methods, st.floats(0, 1), st.floats(1e2, 1e9), st.floats(1, 10))
def test_a_quicker_network_is_never_slower(
    work: RankWork, method: Settings, latency: float, bandwidth: float, factor: float
) -> None:
    slow = simulate(work, 8, nodes_of_four(latency, bandwidth), method)
    quick = simulate(work, 8, nodes_of_four(latency / factor, bandwidth * factor), method)
    assert quick.step <= slow.step * (1 + 1e-9)
    assert simulate(work, 8, FREE, method).step <= quick.step * (1 + 1e-9)


@given(works, methods, st.floats(0, 1), st.floats(1e2, 1e9))
def test_a_step_is_the_sum_of_its_parts(
    work: RankWork, method: Settings, latency: float, bandwidth: float
) -> None:
    found = simulate(replace(work, software=0.1), 8, Network.flat(latency, bandwidth), method)
    assert found.step == pytest.approx(sum(found.parts.values()), abs=1e-9)
    assert all(seconds >= -1e-9 for seconds in found.parts.values())
    assert found.parts["network"] <= found.communication + 1e-9
    assert found.parts[found.limiting] == max(found.parts.values())


def test_ranks_that_meet_seldom_wait_seldom() -> None:
    work = replace(ONE, spread=0.1)
    every = simulate(work, 8, FREE, settings(sync_every=1))
    seldom = simulate(work, 8, FREE, settings(sync_every=100))
    assert seldom.parts["stragglers"] == pytest.approx(every.parts["stragglers"] / 10)


def test_small_messages_are_hidden_before_the_gradients_and_not_behind_them() -> None:
    network = Network.flat(0.125, math.inf)
    plain = simulate(TWO, 2, network).parts["network"]
    assert simulate(replace(TWO, facts=56), 2, network).parts["network"] == plain
    # one message deep, by recursive doubling
    assert simulate(replace(TWO, buffers=56), 2, network).parts["network"] == plain + 0.125
    # a large one in a ring: 1.5 of its size at four ranks
    large = replace(TWO, buffers=10**6)
    narrow = Network.flat(0.0, 1e6)
    exposed = (
        simulate(large, 4, narrow).parts["network"] - simulate(TWO, 4, narrow).parts["network"]
    )
    assert exposed == pytest.approx(1.5)


def test_a_sharded_update_divides_the_optimizer_and_tells_everybody() -> None:
    work = replace(ONE, optimizer=4.0)
    found = simulate(work, 4, Network.flat(0.0, 1e6), settings(update="sharded"))
    assert found.parts["optimizer"] == 1
    assert found.parts["network"] == pytest.approx(1.5 + 0.75)
    assert found.sent == pytest.approx(2.25e6)


def test_what_is_not_simulated_is_refused() -> None:
    with refused("not-planned", name="update", value="server"):
        simulate(TWO, 2, FREE, settings(update="server"))
