"""ShardedOptimizer in the place of torch's ZeroRedundancyOptimizer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lockstep
from tests.refused import refused
from tests.step.walking import same, weights
from tests.teams import on_team


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(40, 70), nn.Tanh(), nn.Linear(70, 30), nn.Tanh(), nn.Linear(30, 1)
    )


def optimizer_of(model: nn.Module, *, sharded: bool) -> torch.optim.Optimizer:
    first, *others = [list(model[layer].parameters()) for layer in (0, 2, 4)]  # type: ignore[index]
    groups = [{"params": first, "lr": 3e-2}, {"params": [*others[0], *others[1]]}]
    if not sharded:
        return torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1)
    return lockstep.ShardedOptimizer(groups, torch.optim.AdamW, lr=1e-2, weight_decay=0.1)


def trained(
    world: lockstep.World, wrapper: str, sharded: bool
) -> tuple[list[Tensor], dict[str, Any]]:
    """Weights, and on rank 0 the state."""
    model = net()
    wrapped = (
        nn.parallel.DistributedDataParallel(model)
        if wrapper == "torch"
        # "auto" takes what is quicker in a trial, and 3 ranks add in another order over gloo
        else lockstep.DistributedDataParallel(model, reduce="shared_memory")
    )
    optimizer = optimizer_of(model, sharded=sharded)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    for step in range(5):
        optimizer.zero_grad()
        x = torch.randn(4, 40, generator=torch.Generator().manual_seed(10 * step + world.rank))
        wrapped(x).square().mean().backward()
        optimizer.step()
        scheduler.step()
    if isinstance(optimizer, lockstep.ShardedOptimizer):
        optimizer.consolidate_state_dict(to=0)
    return weights(model), optimizer.state_dict() if world.rank == 0 else {}


@pytest.mark.parametrize("wrapper", ["torch", "lockstep"])
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_weights_and_state_are_the_plain_optimizers(wrapper: str, workers: int) -> None:
    plain, sharded = (on_team(trained, workers, (wrapper, sharded)) for sharded in (False, True))
    for result, _ in [*plain, *sharded]:
        assert same(result, plain[0][0])
    expected, state = plain[0][1], sharded[0][1]
    assert same(state["state"], expected["state"])
    rates, expected_rates = (
        [group["lr"] for group in saved["param_groups"]] for saved in (state, expected)
    )
    assert rates == expected_rates


def without_collectives(world: lockstep.World) -> list[Tensor]:
    """Steps right after one another: a slow rank still reads what a fast one wants to write."""
    model = nn.Linear(600, 600)
    nn.init.ones_(model.weight)
    optimizer = lockstep.ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=1.0)
    for _ in range(200):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    return [model.weight.unique()]


def test_no_rank_overtakes_another() -> None:
    assert [weights[0].tolist() for weights in on_team(without_collectives, 3)] == [[-199.0]] * 3


def resumed(world: lockstep.World, state: dict[str, Any]) -> tuple[list[Tensor], float]:
    model = net()
    optimizer = optimizer_of(model, sharded=world.size > 1)
    optimizer.load_state_dict(state)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return weights(model), optimizer.param_groups[0]["lr"]


def test_its_state_loads_into_the_plain_optimizer_and_at_another_number_of_ranks() -> None:
    state = on_team(trained, 3, ("torch", True))[0][1]
    (expected,) = on_team(resumed, 1, (state,))
    for result in on_team(resumed, 2, (state,)):
        assert same(result, expected)


def test_what_it_cannot_do_is_refused() -> None:
    with lockstep.init(backend="gloo"):
        parameters = [nn.Parameter(torch.ones(3))]
        with refused("optimizer-needs-closure", optimizer="LBFGS"):
            lockstep.ShardedOptimizer(parameters, torch.optim.LBFGS)
        with refused("keyword-without-meaning", name="overlap_with_ddp", value=True):
            lockstep.ShardedOptimizer(parameters, torch.optim.SGD, overlap_with_ddp=True, lr=0.1)
        optimizer = lockstep.ShardedOptimizer(parameters, torch.optim.SGD, lr=0.1)
        with refused(
            "needs-call-before",
            call="state_dict() on rank 0",
            before="consolidate_state_dict(to=0) on every rank",
        ):
            optimizer.state_dict()
        other = torch.optim.SGD([nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))], lr=0.1)
        with refused("optimizer-state-does-not-fit", there=[2], here=[1]):
            optimizer.load_state_dict(other.state_dict())


def in_a_subgroup(world: lockstep.World) -> list[float]:
    groups = [dist.new_group([0, 1]), dist.new_group([2])]
    weight = nn.Parameter(torch.full((3000,), float(world.rank // 2)))
    group = groups[world.rank // 2]
    optimizer = lockstep.ShardedOptimizer([weight], torch.optim.SGD, process_group=group, lr=1.0)
    weight.grad = torch.ones(3000)
    optimizer.step()
    return weight.detach().unique().tolist()


def test_it_works_in_a_group_of_torchs() -> None:
    assert on_team(in_a_subgroup, 3) == [[-1.0], [-1.0], [0.0]]
