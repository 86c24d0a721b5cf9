"""Ranks on several hosts: summed in each host's memory, then between the hosts. The hosts are
this one, under other names.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lockstep
from lockstep.errors import WorkerFailed
from lockstep.gradients.layout import ALIGNMENT, FIRST_BUCKET, aligned
from lockstep.gradients.reductions import Hierarchical, reduction
from lockstep.launcher.logs import COLLECTIVES
from lockstep.testing import run_ranks
from tests.refused import refused

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


def found_hosts(world: lockstep.World, counts: tuple[int, ...]) -> object:
    with on_hosts(world, counts) as apart:
        hosts = apart.group.find_hosts()
        assert apart.group.find_hosts() is hosts, "asked once"
        return hosts and (hosts.local.ranks, hosts.across.ranks, hosts.owners)


def test_ranks_find_out_who_shares_their_host() -> None:
    assert run_ranks(found_hosts, 4, args=(EVEN,)) == [
        ((0, 1), (0, 2), 2),
        ((0, 1), (1, 3), 2),
        ((2, 3), (0, 2), 2),
        ((2, 3), (1, 3), 2),
    ]
    assert run_ranks(found_hosts, 3, args=(UNEVEN,)) == [
        ((0, 1), (0, 2), 1),
        ((0, 1), (1,), 1),
        ((2,), (0, 2), 1),
    ]
    assert run_ranks(found_hosts, 3, args=(ONE_EACH,)) == [None] * 3
    assert run_ranks(found_hosts, 2, args=((2,),)) == [None] * 2


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


@pytest.mark.parametrize("counts", [EVEN, UNEVEN, (1, 2, 2), (3, 3)])
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
    world: lockstep.World, counts: tuple[int, ...], reduce: str, update: str
) -> tuple[str, Tensor]:
    with on_hosts(world, counts) as apart:
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
            for x, y in stepper.micro_batches(
                [batch(step, apart.rank), batch(step + 50, apart.rank)]
            ):
                stepper.backward(F.cross_entropy(model(x), y, reduction="sum"), weight=len(y))
            stepper.step()
        return (
            stepper.reducer.reduction.name,
            nn.utils.parameters_to_vector(model.parameters()).detach(),
        )


def alone(ranks: int) -> Tensor:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    for step in range(4):
        optimizer.zero_grad()
        parts = [batch(k, rank) for rank in range(ranks) for k in (step, step + 50)]
        loss = torch.stack(
            [F.cross_entropy(model(x), y, reduction="sum") for x, y in parts]
        ).sum() / sum(len(y) for _, y in parts)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return nn.utils.parameters_to_vector(model.parameters()).detach()


@pytest.mark.parametrize("update", ["replicated", "sharded"])
@pytest.mark.parametrize("counts", [EVEN, UNEVEN])
def test_training_over_hosts_is_training_on_one_process(
    counts: tuple[int, ...], update: str
) -> None:
    expected = alone(sum(counts))
    ranks = run_ranks(trained, sum(counts), args=(counts, "hierarchical", update))
    for name, weights in ranks:
        assert name == "hierarchical"
        assert torch.equal(weights, ranks[0][1])
        torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6)


def test_auto_takes_what_all_agree_to_be_quicker() -> None:
    names = {name for name, _ in run_ranks(trained, 4, args=(EVEN, "auto", "replicated"))}
    assert len(names) == 1
    assert names <= {"native", "hierarchical"}
    assert {name for name, _ in run_ranks(trained, 3, args=(ONE_EACH, "auto", "replicated"))} == {
        "native"
    }


def tried(world: lockstep.World, folder: Path) -> list[str]:
    """The collectives of the first choice, then of a second."""
    file = folder / f"{world.rank}"
    os.environ[COLLECTIVES] = str(file)
    with on_hosts(world, (2,)) as apart:
        begun = apart.group.number
        chosen = reduction("auto", apart.group)
        between = apart.group.number
        assert reduction("auto", apart.group).name == chosen.name
        assert apart.group.number == between, "tried once"
    lines = re.findall(r"collective #(\d+) (.*?), \d+ elements", file.read_text())
    return [said for number, said in lines if begun < int(number) <= between]


def test_auto_tries_what_training_would_do_with_a_bucket(tmp_path: Path) -> None:
    """Beside the backend's sum of the same bucket, in turns; not how long it takes."""
    bucket = f"f32[{aligned(FIRST_BUCKET // 4) + ALIGNMENT}] for gradient bucket 0 (a trial)"
    runs = [f"all_reduce sum {bucket}", f"all_reduce sum in place {bucket}"]
    for said in run_ranks(tried, 2, args=(tmp_path,)):
        trial = [*runs * 5, "all_reduce max f64[2] for a trial"]
        assert said == trial * (len(said) // len(trial))
        assert said


def impossible(world: lockstep.World, counts: tuple[int, ...], tags: str) -> None:
    with on_hosts(world, counts, tags=tags) as apart, refused("hierarchical-impossible"):
        reduction("hierarchical", apart.group)


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
