"""Bytes and seconds as numbers, worked out by hand; and the bytes against what ranks really count."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import lockstep
from lockstep.collectives.network import Link
from lockstep.plan.methods.cost import Computation, Gradients, seconds, traffic
from lockstep.plan.methods.names import METHODS, method_of
from lockstep.testing import run_ranks

# A matrix of 1000 x 600, which is worth factoring, one of 4 x 5, which is not at rank 4, and a vector.
SHAPES = ((1000, 600), (4, 5), (380,))
ELEMENTS = 600_400
MODEL = Gradients(SHAPES, (400, 600_000))
S = 4 * ELEMENTS
SLOW = Link(1e-3, 1e6)


@pytest.mark.parametrize(
    ("method", "workers", "sends"),
    [
        ("native", 2, S),
        ("native", 4, 1.5 * S),
        ("ring", 4, 1.5 * S),
        ("central", 4, 3 * S),
        ("tree", 4, 2 * S),  # rank 0 sends it down to two; rank 2 once up and once down
        ("halving_doubling", 4, 1.5 * S),
        ("--compress bf16", 4, 0.75 * S),
        ("--compress fp16", 2, 0.5 * S),
        ("--compress int8", 4, 1.5 * (ELEMENTS + 4 * ELEMENTS / 64)),
        ("--compress powersgd:4", 4, 1.5 * 4 * (4 * 1600 + 20 + 380)),
        ("--compress powersgd:1", 2, 4 * (1600 + 9 + 380)),
        ("--compress topk:0.01", 4, 3 * 6004 * 8),
        ("--sync-every 50", 4, 1.5 * S / 50),
        ("--sync-every 50 --outer nesterov", 2, S / 50),
        ("--sync-every 10 --compress bf16", 4, 0.075 * S),
        ("--update server", 4, 1.5 * S),
        ("--update server:shards=1", 4, 3 * S),
    ],
)
def test_bytes_that_the_busiest_rank_sends_in_a_step(method: str, workers: int, sends: float) -> None:
    assert traffic(method_of(method), MODEL, workers).sends == pytest.approx(sends)


@pytest.mark.parametrize("method", METHODS)
def test_one_rank_sends_nothing_and_takes_what_it_computes(method: str) -> None:
    alone = traffic(method_of(method), MODEL, 1)
    assert (alone.sends, alone.passes, alone.rounds) == (0, 0, 0)
    assert seconds(method_of(method), MODEL, 1, SLOW, Computation(0.5, 0.1)) == 0.5


def step(method: str, workers: int, computation: Computation, link: Link = SLOW) -> float:
    return seconds(method_of(method), MODEL, workers, link, computation)


def test_a_ring_does_not_grow_with_the_ranks_and_the_central_way_does() -> None:
    wide = Link(0.0, 1e6)
    nothing = Computation(0.0, 0.0)
    assert [step("native", workers, nothing, wide) / (S / 1e6) for workers in (2, 3, 4)] == pytest.approx([1, 4 / 3, 3 / 2])
    assert [step("central", workers, nothing, wide) / (S / 1e6) for workers in (2, 3, 4)] == pytest.approx([2, 4, 6])


def test_latency_is_paid_for_every_message_of_every_bucket() -> None:
    far = Link(1.0, math.inf)
    nothing = Computation(0.0, 0.0)
    assert step("native", 4, nothing, far) == 2 * 3 * 2
    assert step("central", 4, nothing, far) == 2 * 3 * 3  # tensors in place of buckets
    assert step("--compress powersgd:4", 4, nothing, far) == 3 * 2 * 3  # P of both buckets, Q of the one with a matrix that is worth it
    assert step("--sync-every 10", 4, nothing, far) == pytest.approx(2 * 3 * 2 / 10)


def test_what_leaves_in_the_backward_is_hidden_behind_it_but_for_the_last_bucket() -> None:
    link = Link(0.0, S / 1.0)  # the ring of two takes a second
    last = 600_000 / 600_400
    assert step("native", 2, Computation(10.0, 0.0), link) == pytest.approx(11)
    assert step("native", 2, Computation(10.0, 0.1), link) == pytest.approx(9.9 + 0.1 + last)  # the first one in it
    assert step("native", 2, Computation(10.0, 5.0), link) == pytest.approx(10 + last)
    assert step("--compress bf16", 2, Computation(10.0, 5.0), link) == pytest.approx(10 + 0.25 + 0.25 * last)
    assert step("--sync-every 10", 2, Computation(10.0, 5.0), link) == pytest.approx(10.1)
    assert step("--sync-every 10 --outer nesterov:overlap=2", 2, Computation(10.0, 5.0), link) == 10
    assert step("--update server", 2, Computation(10.0, 5.0), link) == 10
    assert step("--update server --staleness 0", 2, Computation(10.0, 5.0), link) == pytest.approx(11)


def test_a_free_network_costs_nothing() -> None:
    assert {step(method, 64, Computation(0.25, 0.1), Link(0.0, math.inf)) for method in METHODS} == {0.25}


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(128, 64), nn.Linear(64, 96))


def counted(world: lockstep.World, reduce: str) -> int:
    model = net()
    stepper = lockstep.Stepper(model, torch.optim.SGD(model.parameters(), lr=0.0), reduce=reduce, checks="off", world=world)  # type: ignore[arg-type]
    for _ in range(2):
        before = world.group.bytes_sent
        for (x,) in stepper.micro_batches([(torch.randn(2, 128),)]):
            stepper.backward(model(x).sum(), weight=2)
        stepper.step()
    return world.group.bytes_sent - before


@pytest.mark.parametrize("workers", [2, 3, 4])
@pytest.mark.parametrize("reduce", ["native", "ring", "tree", "central"])
def test_ranks_send_what_was_foretold(reduce: str, workers: int) -> None:
    shapes = tuple(tuple(parameter.shape) for parameter in net().parameters())
    foretold = traffic(method_of(reduce), Gradients(shapes, (sum(map(math.prod, shapes)),)), workers)
    assert max(run_ranks(counted, workers, args=(reduce,))) == pytest.approx(foretold.sends, rel=0.02)
