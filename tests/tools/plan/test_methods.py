"""Bytes and seconds as numbers, worked out by hand; and the bytes against what ranks really
count.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

import lockstep
from lockstep.runs import Settings
from lockstep.schedules.network import Link, Network
from lockstep.tools.plan.forecast import RankWork, simulate
from lockstep.tools.plan.profile import GradientBucket
from tests.teams import on_team

# A matrix of 1000 x 600, which is worth factoring, one of 4 x 5, which is not at rank 4, and a
# vector.
SHAPES = ((1000, 600), (4, 5), (380,))
ELEMENTS = 600_400
BUCKETS = (
    GradientBucket(ready=400 / ELEMENTS, elements=400, tensors=(SHAPES[2], SHAPES[1])),
    GradientBucket(ready=1.0, elements=600_000, tensors=SHAPES[:1]),
)
S = 4 * ELEMENTS
SLOW = Link(1e-3, 1e6)


def computing(step: float, behind: float) -> RankWork:
    """So many seconds, and gradients can travel behind the last of them."""
    return RankWork(forward=step - behind, backward=behind, micro_batches=1, buckets=BUCKETS)


def method_of(text: str) -> Settings:
    """The options of `lockstep train` in a text; a bare word is a value of --reduce."""
    words = text.split() if text.startswith("--") else ["--reduce", text]
    names = [word.removeprefix("--").replace("-", "_") for word in words[::2]]
    values = [int(word) if word.isdigit() else word for word in words[1::2]]
    return Settings(task="step", **dict(zip(names, values, strict=True)))  # type: ignore[arg-type]


MODEL = computing(0.0, 0.0)


def sends(method: Settings, work: RankWork, workers: int) -> float:
    """Bytes of a step, by the rank that sends most."""
    return simulate(work, workers, Network.flat(0.0, 1.0), method).sent


def step(method: str, workers: int, computation: RankWork, link: Link = SLOW) -> float:
    return simulate(
        computation, workers, Network.flat(link.latency, link.bandwidth), method_of(method)
    ).step


BYTES = [
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
    ("--sync-every 50", 4, 1.5 * S / 50),
    ("--sync-every 50 --outer nesterov", 2, S / 50),
    ("--sync-every 10 --compress bf16", 4, 0.075 * S),
]


def test_bytes_that_the_busiest_rank_sends_in_a_step() -> None:
    for method, workers, expected in BYTES:
        assert sends(method_of(method), MODEL, workers) == pytest.approx(expected), method


def test_a_rank_alone_and_a_free_network_take_what_is_computed() -> None:
    for method in {method for method, *_ in BYTES} | {"--update sharded"}:
        assert sends(method_of(method), MODEL, 1) == 0
        assert step(method, 1, computing(0.5, 0.1)) == 0.5
        assert step(method, 64, computing(0.25, 0.1), Link(0.0, math.inf)) == 0.25


def test_latency_is_paid_for_every_message_of_every_bucket() -> None:
    far = Link(1.0, math.inf)
    assert step("native", 4, MODEL, far) == 2 * 3 * 2
    assert step("central", 4, MODEL, far) == 2 * 3 * 3  # tensors in place of buckets
    # P of both buckets, Q of the one with a matrix that is worth it
    assert step("--compress powersgd:4", 4, MODEL, far) == 3 * 2 * 3
    assert step("--sync-every 10", 4, MODEL, far) == pytest.approx(2 * 3 * 2 / 10)


def test_what_leaves_in_the_backward_is_hidden_behind_it_but_for_the_last_bucket() -> None:
    link = Link(0.0, S / 1.0)  # the ring of two takes a second
    last = 600_000 / 600_400
    assert step("native", 2, computing(10.0, 0.0), link) == pytest.approx(11)
    # the first one in it
    assert step("native", 2, computing(10.0, 0.1), link) == pytest.approx(9.9 + 0.1 + last)
    assert step("native", 2, computing(10.0, 5.0), link) == pytest.approx(10 + last)
    assert step("--compress bf16", 2, computing(10.0, 5.0), link) == pytest.approx(
        10 + 0.25 + 0.25 * last
    )
    assert step("--sync-every 10", 2, computing(10.0, 5.0), link) == pytest.approx(10.1)
    assert step("--sync-every 10 --outer nesterov:overlap=2", 2, computing(10.0, 5.0), link) == 10


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(128, 64), nn.Linear(64, 96))


REDUCTIONS = ("native", "ring", "tree", "central")


def counted(world: lockstep.World) -> dict[str, int]:
    """The bytes that this rank sends in a step, by reduction."""
    sent = {}
    for reduce in REDUCTIONS:
        model = net()
        sgd = torch.optim.SGD(model.parameters(), lr=0.0)
        stepper = lockstep.Stepper(model, sgd, reduce=reduce, checks="off", world=world)
        for _ in range(2):
            before = world.group.bytes_sent
            for (x,) in stepper.micro_batches([(torch.randn(2, 128),)]):
                stepper.backward(model(x).sum(), weight=2)
            stepper.step()
        sent[reduce] = world.group.bytes_sent - before
    return sent


@pytest.mark.parametrize("workers", [2, 3, 4])
def test_ranks_send_what_was_predicted(workers: int) -> None:
    shapes = tuple(tuple(parameter.shape) for parameter in net().parameters())
    elements = sum(map(math.prod, shapes))
    bucket = GradientBucket(ready=1.0, elements=elements, tensors=shapes)
    work = replace(MODEL, buckets=[bucket])
    ranks = on_team(counted, workers)
    for reduce in REDUCTIONS:
        predicted = sends(method_of(reduce), work, workers)
        most = max(sent[reduce] for sent in ranks)
        assert most == pytest.approx(predicted, rel=0.02), reduce
