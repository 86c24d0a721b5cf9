"""Ranks on several hosts: summed in each host's memory, then between the hosts. The hosts are
this one, under other names.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lockstep
from lockstep.errors import WorkerFailed
from lockstep.gradients.reductions import Hierarchical, reduction
from lockstep.testing import run_ranks
from tests.refused import refused
from tests.step.walking import walk

# Ranks of each host.
EVEN, UNEVEN, ONE_EACH = (2, 2), (2, 1), (1, 1, 1)


@contextmanager
def on_hosts(
    world: lockstep.World, counts: tuple[int, ...], **options: str
) -> Iterator[lockstep.World]:
    """The same ranks again, said to be on several hosts."""
    rank, size = world.rank, world.size
    world.close()
    node, local = next(
        (node, rank - sum(counts[:node]))
        for node in range(len(counts))
        if rank < sum(counts[: node + 1])
    )
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(size),
        LOCAL_RANK=str(local),
        LOCAL_WORLD_SIZE=str(counts[node]),
        GROUP_RANK=str(node),
    )
    with lockstep.init(backend="gloo", timeout=timedelta(seconds=30), **options) as apart:  # type: ignore[arg-type]
        yield apart


def hosts_of(world: lockstep.World, counts: tuple[int, ...]) -> object:
    with on_hosts(world, counts) as apart:
        hosts = apart.group.find_hosts()
        assert apart.group.find_hosts() is hosts, "asked once"
        return hosts and (hosts.local.ranks, hosts.across.ranks, hosts.owners)


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        (
            EVEN,
            [((0, 1), (0, 2), 2), ((0, 1), (1, 3), 2), ((2, 3), (0, 2), 2), ((2, 3), (1, 3), 2)],
        ),
        (UNEVEN, [((0, 1), (0, 2), 1), ((0, 1), (1,), 1), ((2,), (0, 2), 1)]),
        (ONE_EACH, [None] * 3),
        ((2,), [None] * 2),
    ],
)
def test_ranks_find_out_who_shares_their_host(
    counts: tuple[int, ...], expected: list[object]
) -> None:
    assert run_ranks(hosts_of, sum(counts), args=(counts,)) == expected


SIZES = [1, 1024, 3 * 1024 + 5, 100_000, 0]


def noise(rank: int, number: int) -> Tensor:
    return torch.randn(
        SIZES[number],
        generator=torch.Generator().manual_seed(10 * rank + number),
        dtype=torch.float64,
    )


def summed(world: lockstep.World, counts: tuple[int, ...]) -> list[Tensor]:
    with on_hosts(world, counts) as apart:
        over = Hierarchical(apart.group)
        tensors = over.allocate(SIZES, [torch.float64] * len(SIZES))
        for _ in range(3):
            works = []
            for number, tensor in enumerate(tensors):
                tensor.copy_(noise(apart.rank, number))
                works.append(over.start_sum(number, "in a test"))
            for work in reversed(works):
                work.wait()
        return [tensor.clone() for tensor in tensors]


@pytest.mark.parametrize(
    "counts", [EVEN, UNEVEN, (1, 2, 2), pytest.param((3, 3), marks=pytest.mark.rest)]
)
def test_everybody_has_the_sum_of_all_hosts(counts: tuple[int, ...]) -> None:
    ranks = run_ranks(summed, sum(counts), args=(counts,))
    for number in range(len(SIZES)):
        expected = torch.stack([noise(rank, number) for rank in range(sum(counts))]).sum(0)
        for tensors in ranks:
            torch.testing.assert_close(tensors[number], expected, rtol=1e-12, atol=1e-12)
            assert torch.equal(tensors[number], ranks[0][number])


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 600), nn.ReLU(), nn.Linear(600, 3))


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(4 + rank, 8, generator=generator), torch.randint(
        0, 3, (4 + rank,), generator=generator
    )


def trained(
    world: lockstep.World, counts: tuple[int, ...], methods: Sequence[tuple[str, str]]
) -> list[tuple[str, Tensor]]:
    """The reduction and the weights, of each method: reduce and update."""
    results = []
    with on_hosts(world, counts) as apart:
        for reduce, update in methods:
            model = net()
            stepper = lockstep.Stepper(
                model,
                torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True),
                clip=0.5,
                reduce=reduce,
                update=update,
                world=apart,
            )
            for step in range(4):
                walk(stepper, [batch(step, apart.rank), batch(step + 50, apart.rank)])
            weights = nn.utils.parameters_to_vector(model.parameters()).detach()
            results.append((stepper.reducer.reduction.name, weights))
    return results


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


@pytest.mark.parametrize("counts", [EVEN, UNEVEN])
def test_training_over_hosts_is_training_on_one_process(counts: tuple[int, ...]) -> None:
    expected = alone(sum(counts))
    methods = [("hierarchical", "replicated"), ("hierarchical", "sharded"), ("auto", "replicated")]
    by_method = zip(*run_ranks(trained, sum(counts), args=(counts, methods)), strict=True)
    for (reduce, _), results in zip(methods, by_method, strict=True):
        names, ranks = zip(*results, strict=True)
        assert {*names} in ([{"hierarchical"}, {"native"}] if reduce == "auto" else [{reduce}])
        for weights in ranks:
            assert torch.equal(weights, ranks[0])
            torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6)


def tried(world: lockstep.World) -> tuple[int, int]:
    """The collectives of the first choice, and of a second."""
    with on_hosts(world, (2,)) as apart:
        begun = apart.group.number
        chosen = reduction("auto", apart.group)
        between = apart.group.number
        assert reduction("auto", apart.group).name == chosen.name
        return between - begun, apart.group.number - between


def test_auto_tries_what_is_quicker_once() -> None:
    for first, second in run_ranks(tried, 2):
        assert first > 0
        assert second == 0


def impossible(world: lockstep.World, counts: tuple[int, ...], tags: str) -> None:
    with on_hosts(world, counts, tags=tags) as apart:
        with refused("hierarchical-impossible"):
            reduction("hierarchical", apart.group)
        assert counts != ONE_EACH or reduction("auto", apart.group).name == "native"


def test_where_it_makes_no_sense_it_is_refused() -> None:
    for counts, tags in ((ONE_EACH, "host"), ((3,), "host"), (UNEVEN, "off")):
        run_ranks(impossible, 3, args=(counts, tags))


def one_raises(world: lockstep.World) -> None:
    with on_hosts(world, EVEN) as apart:
        over = Hierarchical(apart.group)
        over.allocate([5000], [torch.float32])
        if apart.rank == 3:
            raise ValueError("the disk is gone")
        over.start_sum(0, "in a test").wait()


def test_a_rank_that_fails_is_the_one_that_is_named() -> None:
    with pytest.raises(WorkerFailed, match=r"rank 3 .*the disk is gone"):
        run_ranks(one_raises, 4)
