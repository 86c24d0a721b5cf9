"""Ranks summed in each host's memory, then between the hosts: this one, under other names."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lockstep
from lockstep.gradients.reductions import Hierarchical, reduction
from lockstep.testing import run_ranks
from tests import zoo
from tests.collectives.own_groups import on_hosts
from tests.refused import refused
from tests.step.walking import walk

# Ranks of each host.
EVEN, UNEVEN = (2, 2), (2, 1)


def hosts_of(world: lockstep.World) -> object:
    hosts = world.group.find_hosts()
    assert world.group.find_hosts() is hosts, "asked once"
    return hosts and (hosts.local.ranks, hosts.across.ranks, hosts.owners)


HOSTS = {
    EVEN: [((0, 1), (0, 2), 2), ((0, 1), (1, 3), 2), ((2, 3), (0, 2), 2), ((2, 3), (1, 3), 2)],
    UNEVEN: [((0, 1), (0, 2), 1), ((0, 1), (1,), 1), ((2,), (0, 2), 1)],
}


SIZES = [1, 1024, 3 * 1024 + 5, 100_000, 0]


def noise(rank: int, number: int) -> Tensor:
    return torch.randn(
        SIZES[number],
        generator=torch.Generator().manual_seed(10 * rank + number),
        dtype=torch.float64,
    )


def summed(world: lockstep.World) -> list[Tensor]:
    over = Hierarchical(world.group)
    tensors = over.allocate(SIZES, [torch.float64] * len(SIZES))
    for _ in range(3):
        works = []
        for number, tensor in enumerate(tensors):
            tensor.copy_(noise(world.rank, number))
            works.append(over.start_sum(number, "in a test"))
        for work in reversed(works):
            work.wait()
    return [tensor.clone() for tensor in tensors]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 600), nn.ReLU(), nn.Linear(600, 3))


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(4 + rank, 8, generator=generator), torch.randint(
        0, 3, (4 + rank,), generator=generator
    )


METHODS = (("hierarchical", "replicated"), ("hierarchical", "sharded"), ("auto", "replicated"))


def trained(world: lockstep.World, reduce: str, update: str) -> tuple[str, Tensor]:
    """The reduction and the weights."""
    model = net()
    stepper = lockstep.Stepper(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True),
        clip=0.5,
        reduce=reduce,
        update=update,
        world=world,
    )
    for step in range(4):
        walk(stepper, [batch(step, world.rank), batch(step + 50, world.rank)])
    weights = nn.utils.parameters_to_vector(model.parameters()).detach()
    return stepper.reducer.reduction.name, weights


def alone(ranks: int) -> Tensor:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    for step in range(4):
        optimizer.zero_grad()
        x, y = zip(
            *(batch(k, rank) for rank in range(ranks) for k in (step, step + 50)), strict=True
        )
        F.cross_entropy(model(torch.cat(x)), torch.cat(y)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def tried(world: lockstep.World) -> tuple[int, int]:
    """The collectives of the first choice, and of a second."""
    begun = world.group.number
    chosen = reduction("auto", world.group)
    between = world.group.number
    assert reduction("auto", world.group).name == chosen.name
    return between - begun, world.group.number - between


@dataclass
class OverHosts:
    hosts: object
    sums: list[Tensor]
    tried: tuple[int, int]
    trained: list[tuple[str, Tensor]]


def over_hosts(world: lockstep.World, counts: tuple[int, ...]) -> OverHosts:
    with on_hosts(world, counts) as apart:
        return OverHosts(
            hosts_of(apart),
            summed(apart),
            tried(apart),
            [trained(apart, *method) for method in METHODS],
        )


@pytest.mark.parametrize(
    "counts",
    [EVEN, UNEVEN, *(pytest.param(more, marks=pytest.mark.rest) for more in ((1, 2, 2), (3, 3)))],
)
def test_sums_and_training_over_hosts_are_those_of_one_process(counts: tuple[int, ...]) -> None:
    ranks = run_ranks(over_hosts, sum(counts), args=(counts,))
    if counts in HOSTS:
        assert [rank.hosts for rank in ranks] == HOSTS[counts]
    for number in range(len(SIZES)):
        expected = torch.stack([noise(rank, number) for rank in range(sum(counts))]).sum(0)
        for rank in ranks:
            torch.testing.assert_close(rank.sums[number], expected, rtol=1e-12, atol=1e-12)
            assert torch.equal(rank.sums[number], ranks[0].sums[number])
    assert all(rank.tried[0] > 0 and rank.tried[1] == 0 for rank in ranks)
    weights = alone(sum(counts))
    for number, (reduce, _) in enumerate(METHODS):
        names, results = zip(*(rank.trained[number] for rank in ranks), strict=True)
        assert {*names} in ([{"hierarchical"}, {"native"}] if reduce == "auto" else [{reduce}])
        for result in results:
            assert torch.equal(result, results[0])
            assert zoo.distance(result, weights) < 1e-6


def impossible(world: lockstep.World) -> None:
    for counts, tags in (((1, 1, 1), "host"), ((3,), "host"), (UNEVEN, "off")):
        with on_hosts(world, counts, tags=tags) as apart:
            with refused("hierarchical-impossible"):
                reduction("hierarchical", apart.group)
            if sum(counts) == len(counts):
                assert hosts_of(apart) is None
                assert reduction("auto", apart.group).name == "native"


def test_where_it_makes_no_sense_it_is_refused() -> None:
    run_ranks(impossible, 3)
