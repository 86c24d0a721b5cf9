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

from lockstep.collectives.network import Link, Network
from lockstep.config.mesh import Mesh
from lockstep.config.parallelism import Parallelism
from lockstep.errors import UsageError
from lockstep.tools.plan.carriers import Cost, OneHost
from lockstep.tools.plan.simulate import Assumed, expected_maximum, simulate
from lockstep.tools.plan.work import RankWork
from lockstep.tools.timing.profile import Leaves
from tests.refused import refused

FREE = Network.flat(0.0, math.inf)
# a megabyte
ONE = RankWork(
    forward=1.0, backward=2.0, micro_batches=1, buckets=(Leaves(ready=1.0, elements=250_000),)
)
TWO = replace(
    ONE, buckets=(Leaves(ready=0.5, elements=250_000), Leaves(ready=1.0, elements=250_000))
)


def test_a_rank_alone_takes_what_it_computes() -> None:
    work = replace(
        TWO, micro_batches=3, optimizer=0.5, other=0.25, loading=0.125, buffers=100, facts=100
    )
    found = simulate(work, 1, Network.flat(1.0, 1.0))
    assert (found.step, found.exposed, found.sent) == (9.875, 0, 0)
    assert found.parts["computation"] == 9
    assert (found.low, found.high) == (found.step, found.step)


@pytest.mark.parametrize("workers", [2, 64, 65_536])
def test_without_a_network_only_the_slowest_is_waited_for(workers: int) -> None:
    assert simulate(TWO, workers, FREE).step == 3
    spread = simulate(replace(TWO, spread=0.01), workers, FREE)
    assert spread.step == pytest.approx(3 * (1 + 0.01 * expected_maximum(workers)))
    assert spread.straggling == pytest.approx(spread.step - 3)
    assert spread.low < spread.step < spread.high


def test_ranks_that_take_turns_on_a_core_are_late_together() -> None:
    found = simulate(replace(TWO, spread=0.01, in_turns=4), 8, FREE)
    assert found.straggling == pytest.approx(3 * 0.01 / 2 * expected_maximum(2))


@pytest.mark.parametrize("workers", [2, 3, 8])
def test_one_bucket_that_is_complete_at_the_end_hides_nothing(workers: int) -> None:
    found = simulate(ONE, workers, Network.flat(0.001, 1e6))
    ring = 2 * (workers - 1) * 0.001 + 2 * (workers - 1) / workers
    assert found.exposed == pytest.approx(ring)
    assert found.communication == pytest.approx(ring)
    assert found.step == pytest.approx(3 + ring)


def test_what_is_complete_early_is_hidden_behind_the_rest() -> None:
    found = simulate(TWO, 2, Network.flat(0.0, 1e6))  # a second each
    assert (found.communication, found.exposed) == (2, 1)
    # two seconds each: the second waits for the first
    slow = simulate(TWO, 2, Network.flat(0.0, 0.5e6))
    assert (slow.communication, slow.exposed) == (4, 3)


def test_only_the_last_micro_batch_hides_anything() -> None:
    one, four = (
        simulate(replace(TWO, micro_batches=count), 2, Network.flat(0.0, 0.25e6))
        for count in (1, 4)
    )
    assert one.exposed == four.exposed


def test_a_step_infinitely_quick_is_the_link() -> None:
    found = simulate(replace(TWO, forward=0.0, backward=0.0), 4, Network.flat(0.0, 1e6))
    assert found.step == found.exposed == pytest.approx(3)
    assert found.limiting == "network"


works = st.builds(
    RankWork,
    forward=st.floats(0, 10),
    backward=st.floats(0, 10),
    micro_batches=st.integers(1, 4),
    optimizer=st.floats(0, 1),
    spread=st.floats(0, 0.2),
    buckets=st.lists(st.tuples(st.floats(0, 1), st.integers(1, 10**6)), min_size=1, max_size=4).map(
        lambda found: tuple(
            Leaves(ready=ready, elements=elements) for ready, elements in sorted(found)
        )
    ),
)
methods = st.sampled_from(
    [
        Parallelism(),
        Parallelism(reduce="tree"),
        Parallelism(reduce="central"),
        Parallelism(compress="bf16"),
        Parallelism(sync_every=7),
        Parallelism(update="sharded"),
        Parallelism(update="server"),
        Parallelism(mesh=Mesh(data=2, shard=4)),
        Parallelism(mesh=Mesh(shard=8)),
    ]
)


@given(works, methods, st.floats(0, 1), st.floats(1e2, 1e9), st.floats(1, 10))
def test_a_quicker_network_is_never_slower(
    work: RankWork, method: Parallelism, latency: float, bandwidth: float, factor: float
) -> None:
    slow = simulate(work, 8, Network(Link(latency, bandwidth), Link(latency, bandwidth), 4), method)
    quick = simulate(
        work,
        8,
        Network(
            Link(latency / factor, bandwidth * factor),
            Link(latency / factor, bandwidth * factor),
            4,
        ),
        method,
    )
    assert quick.step <= slow.step * (1 + 1e-9)
    assert simulate(work, 8, FREE, method).step <= quick.step * (1 + 1e-9)


@given(works, methods, st.floats(0, 1), st.floats(1e2, 1e9))
def test_a_step_is_the_sum_of_its_parts(
    work: RankWork, method: Parallelism, latency: float, bandwidth: float
) -> None:
    found = simulate(
        work, 8, Network.flat(latency, bandwidth), method, Assumed(storage=1.0, link_error=0.1)
    )
    assert found.step == pytest.approx(sum(found.parts.values()), abs=1e-9)
    assert all(seconds >= -1e-9 for seconds in found.parts.values())
    assert found.exposed <= found.communication + 1e-9
    assert found.low <= found.high
    assert found.parts[found.limiting] == max(found.parts.values())


def test_what_loads_beside_the_computation_counts_only_where_it_takes_longer() -> None:
    assert simulate(replace(TWO, loading=2.0), 2, FREE).step == 5
    assert simulate(replace(TWO, loading=2.0, ahead=True), 2, FREE).step == 3
    slow = simulate(replace(TWO, loading=8.0, ahead=True), 2, FREE)
    assert (slow.step, slow.loading, slow.limiting) == (8, 5, "loader")


def test_a_storage_gives_all_ranks_together_so_much() -> None:
    work = replace(TWO, samples=10)
    assert simulate(work, 2, FREE, assumed=Assumed(storage=10)).storage == 0
    shared = simulate(work, 8, FREE, assumed=Assumed(storage=10))
    assert (shared.step, shared.limiting) == (8, "storage")


def test_the_quickest_of_what_the_backend_may_do_is_taken() -> None:
    network = Network.flat(1.0, 1e9)
    ring, both = (
        simulate(ONE, 64, network, assumed=Assumed(native=names))
        for names in (("ring",), ("ring", "halving_doubling"))
    )
    assert ring.exposed == pytest.approx(126, rel=0.01)
    assert both.exposed == pytest.approx(12, rel=0.01)


def test_ranks_that_meet_seldom_wait_seldom() -> None:
    work = replace(ONE, spread=0.1)
    every = simulate(work, 8, FREE, Parallelism(sync_every=1))
    seldom = simulate(work, 8, FREE, Parallelism(sync_every=100))
    assert seldom.straggling == pytest.approx(every.straggling / 10)
    assert simulate(work, 8, FREE, Parallelism(update="server")).straggling == 0
    assert simulate(
        work, 8, FREE, Parallelism(update="server", staleness=0)
    ).straggling == pytest.approx(every.straggling)


def test_small_messages_are_hidden_before_the_gradients_and_not_behind_them() -> None:
    network = Network.flat(0.125, math.inf)
    plain = simulate(TWO, 2, network).exposed
    assert simulate(replace(TWO, facts=56), 2, network).exposed == plain
    # one message deep, by recursive doubling
    assert simulate(replace(TWO, buffers=56), 2, network).exposed == plain + 0.125


def test_a_sharded_update_divides_the_optimizer_and_tells_everybody() -> None:
    work = replace(ONE, optimizer=4.0)
    found = simulate(work, 4, Network.flat(0.0, 1e6), Parallelism(update="sharded"))
    assert found.optimizer == 1
    assert found.exposed == pytest.approx(1.5 + 0.75)
    assert found.sent == pytest.approx(2.25e6)


def test_the_error_of_the_link_widens_the_interval() -> None:
    sure, unsure = (
        simulate(ONE, 2, Network.flat(0.0, 1e6), assumed=Assumed(link_error=error))
        for error in (0.0, 0.2)
    )
    assert (sure.low, sure.high) == (4, 4)
    assert (unsure.low, unsure.high) == pytest.approx((3.8, 4.2))
    assert unsure.step == 4


class TestOneHost:
    HOST = OneHost({2: Cost(0.125, 1e-6, 1, 1.0)}, {2: 0.25})

    def test_sums_wait_for_the_cores(self) -> None:
        found = simulate(TWO, 2, self.HOST)
        assert found.exposed == pytest.approx(2 * 1.125)
        assert found.sent == 2e6

    def test_on_gpus_they_do_not(self) -> None:
        found = simulate(TWO, 2, replace(self.HOST, beside=True))
        # the first is under way until 0.125 s after the end
        assert found.exposed == pytest.approx(1.25)

    def test_each_small_message_is_one(self) -> None:
        plain = simulate(TWO, 2, self.HOST).step
        assert simulate(replace(TWO, facts=1, buffers=1), 2, self.HOST).step == pytest.approx(
            plain + 0.5
        )

    @pytest.mark.parametrize(
        "method", [Parallelism(update="server"), Parallelism(mesh=Mesh(shard=2))]
    )
    def test_what_was_not_measured_there_is_refused(self, method: Parallelism) -> None:
        name, value = ("mesh", "shard=2") if method.mesh else ("update", "server")
        with refused("not-measured-here", name=name, value=value):
            simulate(TWO, 2, self.HOST, method)


class TestMesh:
    BLOCKS = replace(TWO, micro_batches=4, layers=8, activation=1e6)

    def test_a_pipeline_waits_for_its_ends(self) -> None:
        found = simulate(self.BLOCKS, 2, FREE, Parallelism(mesh=Mesh(pipeline=2)))
        assert (found.computation, found.bubble) == (6, 1.5)  # (p - 1) / m of the computation

    def test_a_tensor_axis_sums_activations_four_times_a_layer(self) -> None:
        found = simulate(self.BLOCKS, 2, Network.flat(0.0, 1e6), Parallelism(mesh=Mesh(tensor=2)))
        assert found.computation == 6
        assert found.exposed == pytest.approx(4 * 8 * 4)
        assert found.sent == pytest.approx(4 * 8 * 4 * 1e6)

    def test_gradients_are_summed_over_those_that_hold_the_same(self) -> None:
        found = simulate(self.BLOCKS, 4, FREE, Parallelism(mesh=Mesh(data=2, tensor=2)))
        assert found.sent == pytest.approx(4 * 8 * 4 * 1e6 + 1e6)

    def test_statistics_that_move_cross_beside_sharded_parameters(self) -> None:
        slow, method = Network.flat(1.0, 1e9), Parallelism(mesh=Mesh(shard=4))
        assert (
            simulate(replace(TWO, buffers=8), 4, slow, method).step
            > simulate(replace(TWO, buffers=0), 4, slow, method).step
        )

    def test_sharded_parameters_cross_in_every_micro_batch(self) -> None:
        once = simulate(TWO, 4, FREE, Parallelism(mesh=Mesh(shard=4)))
        # gathers of both, again of one, scatters of both
        assert once.sent == pytest.approx(0.75 * (2 * 1e6 * 2 + 1e6))
        assert simulate(
            replace(TWO, micro_batches=3), 4, FREE, Parallelism(mesh=Mesh(shard=4))
        ).sent == pytest.approx(3 * once.sent)

    @pytest.mark.parametrize(
        ("mesh", "parts"),
        [
            (Mesh(data=8), 1),
            (Mesh(shard=8), 8),
            (Mesh(data=2, shard=4), 4),
            (Mesh(pipeline=2, data=4), 2),
            (Mesh(shard=2, tensor=2, data=2), 4),
        ],
    )
    def test_a_rank_updates_what_it_keeps(self, mesh: Mesh, parts: int) -> None:
        found = simulate(replace(self.BLOCKS, optimizer=8.0), 8, FREE, Parallelism(mesh=mesh))
        assert (found.optimizer, found.computation) == (
            8 / parts,
            12 / (mesh.pipeline * mesh.tensor),
        )

    @pytest.mark.parametrize(
        ("mesh", "message"),
        [
            (Mesh(data=3), "has 3 ranks"),
            (Mesh(pipeline=2, tensor=2), r"mesh pipeline=2,tensor=2 .*\[mesh-not-planned\]"),
        ],
    )
    def test_what_cannot_be_is_refused(self, mesh: Mesh, message: str) -> None:
        with pytest.raises(UsageError, match=message):
            simulate(TWO, 4, FREE, Parallelism(mesh=mesh))

    def test_more_stages_than_layers_are_refused(self) -> None:
        with refused("mesh-too-many-stages", mesh="pipeline=16", layers=8):
            simulate(self.BLOCKS, 16, FREE, Parallelism(mesh=Mesh(pipeline=16)))


@pytest.mark.parametrize(
    ("changes", "code", "values"),
    [
        ({"forward": -1.0}, "number-out-of-range", {"name": "forward", "value": -1.0}),
        ({"spread": math.nan}, "number-out-of-range", {"name": "spread", "value": math.nan}),
        ({"backward": math.inf}, "number-out-of-range", {"name": "backward", "value": math.inf}),
        ({"micro_batches": 0}, "not-a-whole-number", {"name": "micro_batches", "value": 0}),
        (
            {"buckets": (Leaves(ready=1.5, elements=1),)},
            "number-out-of-range",
            {"name": "ready", "value": 1.5},
        ),
    ],
)
def test_work_that_cannot_be(changes: dict[str, Any], code: str, values: dict[str, Any]) -> None:
    with refused(code, **values):
        replace(ONE, **changes)


def test_no_ranks() -> None:
    with refused("not-a-whole-number", name="workers", value=0):
        simulate(ONE, 0, FREE)
