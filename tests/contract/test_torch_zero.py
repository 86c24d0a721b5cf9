"""What torch's ZeroRedundancyOptimizer promises, asked of it and of ShardedOptimizer in its place:
every check runs on both.

What differs on purpose stands in docs/guide/one-host.md, and in the last test here. Uneven inputs
are in test_wrapper.py.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW

import lockstep
from tests.teams import on_team

Make = Callable[..., Any]


def maker(kind: str) -> Make:
    if kind == "lockstep":
        return lockstep.ShardedOptimizer
    with warnings.catch_warnings():
        # of torch.jit, which its module still uses
        warnings.simplefilter("ignore", DeprecationWarning)
        from torch.distributed.optim import ZeroRedundancyOptimizer
    return ZeroRedundancyOptimizer


def scalar(value: float = 1.0) -> Tensor:
    return torch.tensor([value], requires_grad=True)


def small() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 10), nn.Linear(10, 10), nn.Linear(10, 5))


def close(one: nn.Module, other: nn.Module) -> None:
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b)


# -- constructing --------------------------------------------------------------------------------


def refuses_what_are_no_parameters(world: lockstep.World, make: Make) -> None:
    linear = nn.Linear(3, 3)
    for params, error in (
        ([], ValueError),
        (torch.ones(2), TypeError),
        (2.5, TypeError),
        ([*linear.parameters(), "weight"], TypeError),
        ([torch.sparse_coo_tensor(size=(2, 3))], ValueError),
        ([torch.ones(2), torch.sparse_coo_tensor(size=(2, 3))], ValueError),
    ):
        with pytest.raises(error):
            make(params, optimizer_class=SGD, lr=0.1)


def takes_generators_lists_and_groups(world: lockstep.World, make: Make) -> None:
    layers = small()
    assert len(make(layers.parameters(), optimizer_class=SGD, lr=0.1).param_groups) == 1
    assert len(make(list(layers.parameters()), SGD, lr=0.1).param_groups[0]["params"]) == 6
    groups = [
        {"params": [each.weight for each in layers], "weight_decay": 0.0},
        {"params": [each.bias for each in layers]},
    ]
    made = make(groups, optimizer_class=AdamW, lr=0.1, betas=(0.5, 0.9), weight_decay=0.3)
    assert [group["weight_decay"] for group in made.param_groups] == [0.0, 0.3]
    assert [group["betas"] for group in made.optim.param_groups] == [(0.5, 0.9)] * 2


def knows_its_process_group(world: lockstep.World, make: Make) -> None:
    assert make([scalar()], SGD, lr=0.1).process_group is dist.group.WORLD
    group = dist.new_group([0, 1])
    assert make([scalar()], SGD, process_group=group, lr=0.1).process_group is group


def shares_are_alike(world: lockstep.World, make: Make) -> None:
    def elements(made: Any) -> int:
        return sum(each.numel() for group in made.optim.param_groups for each in group["params"])

    sizes = [9, 7, 5, 3] * world.size
    assert elements(make([torch.rand(size, 1) for size in sizes], SGD, lr=0.1)) == 24
    made = make([torch.rand(size, 1, requires_grad=True) for size in sizes[:-1]], SGD, lr=0.1)
    made.add_param_group({"params": [torch.rand(3, 1)]})
    assert (len(made.param_groups), len(made.optim.param_groups), elements(made)) == (2, 2, 24)


# -- stepping ------------------------------------------------------------------------------------


def calls_a_closure_and_returns_its_loss(world: lockstep.World, make: Make) -> None:
    for view in (False, True):
        model = nn.Linear(1, 1)
        nn.init.constant_(model.weight, 1.0)
        nn.init.constant_(model.bias, 2.0)
        made = make(model.parameters(), SGD, parameters_as_bucket_view=view, lr=0.5)

        def closure(made: Any = made, model: nn.Module = model) -> Tensor:
            made.zero_grad()
            loss: Tensor = (model(torch.ones(1, 1)) - 4).abs().sum()
            loss.backward()
            return loss

        assert made.step(closure=closure).item() == 1.0
        assert (model.weight.item(), model.bias.item()) == (1.5, 2.5)


class Noting(SGD):
    def step(self, closure: Any = None, noted: list[Any] | None = None) -> None:  # type: ignore[override]
        super().step()
        assert noted is not None
        noted.append(closure)


class Plainest(SGD):
    def step(self) -> Any:  # type: ignore[override]
        return super().step()


class Writing(SGD):
    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        self.param_groups[0]["written"] = 0.25


def hands_on_what_step_is_given_and_what_it_notes(world: lockstep.World, make: Make) -> None:
    noted: list[Any] = []
    for kind, arguments, options in (
        (Noting, (7,), {"noted": noted}),
        (Plainest, (), {}),
        (Writing, (), {}),
    ):
        weight = scalar()
        made = make([weight], optimizer_class=kind, lr=0.1)
        weight.sum().backward()
        made.step(*arguments, **options)
        torch.testing.assert_close(weight.detach(), torch.tensor([0.9]))
    assert noted == [7]
    assert made.param_groups[0]["written"] == 0.25


def follows_a_scheduler(world: lockstep.World, make: Make) -> None:
    weights = scalar(), scalar()
    optimizers = make([weights[0]], SGD, lr=0.5), SGD([weights[1]], lr=0.5)
    schedulers = [torch.optim.lr_scheduler.StepLR(each, 1, gamma=0.5) for each in optimizers]
    for _ in range(4):
        for weight, optimizer, scheduler in zip(weights, optimizers, schedulers, strict=True):
            optimizer.zero_grad()
            weight.square().sum().backward()
            optimizer.step()
            scheduler.step()
        assert torch.equal(*weights)


def groups_may_come_later(world: lockstep.World, make: Make) -> None:
    models = [small() for _ in range(3)]
    weights, biases = (
        [[getattr(each, name) for each in model] for model in models] for name in ("weight", "bias")
    )
    later = make(weights[1], AdamW, lr=0.1, weight_decay=0.0)
    later.add_param_group({"params": biases[1], "weight_decay": 0.3})
    groups = [
        [{"params": w, "weight_decay": 0.0}, {"params": b, "weight_decay": 0.3}]
        for w, b in zip(weights, biases, strict=True)
    ]
    optimizers = [make(groups[0], AdamW, lr=0.1), later, AdamW(groups[2], lr=0.1)]
    for step in range(3):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            model(torch.full((3, 5), 0.1 * step)).sum().backward()
            optimizer.step()
        close(models[0], models[1])
        close(models[0], models[2])


def works_with_fewer_parameters_than_ranks(world: lockstep.World, make: Make) -> None:
    weight = scalar()
    made = make([weight], Adam, lr=0.1)
    weight.square().sum().backward()
    made.step()
    made.consolidate_state_dict(to=1)
    if world.rank == 1:
        assert list(made.state_dict()["state"]) == [0]
    torch.testing.assert_close(weight.detach(), torch.tensor([0.9]))


def works_in_a_subgroup(world: lockstep.World, make: Make) -> None:
    group = dist.new_group([1])
    if world.rank == 1:
        weight = scalar()
        made = make([weight], SGD, process_group=group, lr=0.5)
        weight.sum().backward()
        made.step()
        assert weight.item() == 0.5


class ByNorm(torch.optim.Optimizer):
    """Not elementwise: divides by the norm of a whole gradient, which may be sparse."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is not None:
                    gradient = each.grad.to_dense()
                    self.state[each]["norms"] = [
                        *self.state[each].get("norms", []),
                        float(gradient.norm()),
                    ]
                    each -= group["lr"] * gradient / gradient.norm()


def works_with_optimizers_that_are_not_elementwise(world: lockstep.World, make: Make) -> None:
    for kind in (ByNorm, torch.optim.SparseAdam):
        models = [nn.Embedding(50, 8, sparse=True, _weight=torch.ones(50, 8)) for _ in range(2)]
        optimizers = [
            kind(models[0].parameters(), lr=0.1),
            make(models[1].parameters(), kind, lr=0.1),
        ]
        for model, optimizer in zip(models, optimizers, strict=True):
            model(torch.tensor([3, 3, 7])).sum().backward()
            optimizer.step()
        close(*models)


# -- state ---------------------------------------------------------------------------------------


def state_has_torchs_form_and_comes_back(world: lockstep.World, make: Make) -> None:
    weight = scalar()
    made = make([weight], SGD, lr=0.1, momentum=0.9)
    weight.sum().backward()
    made.step()
    owner = world.rank if weight in made.optim.state else 1 - world.rank
    if owner == world.rank:
        assert made.optim.state[weight]["momentum_buffer"].tolist() == [1.0]
    states = []
    for rank in range(world.size):
        made.consolidate_state_dict(to=rank)
        if world.rank == rank:
            states.append(copy.deepcopy(made.state_dict()))
    assert set(states[0]) == {"state", "param_groups"}
    group = states[0]["param_groups"][0]
    assert (group["lr"], group["momentum"], group["nesterov"], group["params"]) == (
        0.1,
        0.9,
        False,
        [0],
    )
    assert all(group[name] == made.param_groups[0][name] for name in group if name != "params")
    other = make([weight], SGD, lr=0.7)
    other.load_state_dict(states[0])
    assert other.param_groups[0]["lr"] == 0.1
    weight.grad = torch.ones(1)
    other.step()
    torch.testing.assert_close(weight.detach(), torch.tensor([0.71]))


def state_is_only_where_it_was_brought(world: lockstep.World, make: Make) -> None:
    model = small()
    made = make(model.parameters(), SGD, lr=0.1, momentum=0.9)
    with pytest.raises(RuntimeError):
        made.state_dict()
    model(torch.ones(1, 5)).sum().backward()
    made.step()
    made.consolidate_state_dict(to=1)
    found: list[Any] = [None]
    if world.rank == 1:
        found = [made.state_dict()]
        assert len(found[0]["state"]) == 6
    else:
        with pytest.raises(RuntimeError):
            made.state_dict()
    dist.broadcast_object_list(found, src=1)
    made.load_state_dict(found[0])


def equals_the_local_optimizer_under_ddp(world: lockstep.World, make: Make) -> None:
    for kind, options in (
        (Adam, {}),
        (AdamW, {"maximize": True}),
        (SGD, {"momentum": 0.9, "maximize": True}),
        (SGD, {"parameters_as_bucket_view": True}),
    ):
        view = options.pop("parameters_as_bucket_view", False)
        local, sharded = (
            nn.parallel.DistributedDataParallel(small(), find_unused_parameters=True)
            for _ in range(2)
        )
        plain = kind(local.parameters(), lr=1e-2, **options)
        made = make(sharded.parameters(), kind, parameters_as_bucket_view=view, lr=1e-2, **options)

        def step(number: int, pairs: Any = ((local, plain), (sharded, made))) -> None:
            x = torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * number + world.rank))
            for model, optimizer in pairs:
                optimizer.zero_grad()
                model(x).abs().sum().backward()
                optimizer.step()
            close(pairs[0][0], pairs[1][0])

        for number in range(6):
            step(number)
            for model in (local, sharded):  # frozen and thawed on the way
                next(model.parameters()).requires_grad_(number % 2 == 1)
        made.consolidate_state_dict(to=0)
        states = [made.state_dict() if world.rank == 0 else None]
        dist.broadcast_object_list(states)
        ours, theirs = copy.deepcopy(plain.state_dict()), states[0]
        plain.load_state_dict(copy.deepcopy(theirs))
        made.load_state_dict(copy.deepcopy(ours))
        step(6)
        plain.load_state_dict(ours)
        made.load_state_dict(theirs)
        step(7)


CHECKS = [
    refuses_what_are_no_parameters,
    takes_generators_lists_and_groups,
    knows_its_process_group,
    shares_are_alike,
    calls_a_closure_and_returns_its_loss,
    hands_on_what_step_is_given_and_what_it_notes,
    follows_a_scheduler,
    groups_may_come_later,
    works_with_fewer_parameters_than_ranks,
    works_in_a_subgroup,
    works_with_optimizers_that_are_not_elementwise,
    state_has_torchs_form_and_comes_back,
    state_is_only_where_it_was_brought,
    equals_the_local_optimizer_under_ddp,
]


def kept(world: lockstep.World, name: str, kind: str) -> None:
    (check,) = (check for check in CHECKS if check.__name__ == name)
    groups = set(dist.distributed_c10d._world.pg_map)
    check(world, maker(kind))
    for group in set(dist.distributed_c10d._world.pg_map) - groups:
        dist.destroy_process_group(group)


@pytest.mark.parametrize("kind", ["lockstep", pytest.param("torch", marks=pytest.mark.rest)])
@pytest.mark.parametrize("name", [check.__name__ for check in CHECKS])
def test_both_keep_the_contract(name: str, kind: str) -> None:
    on_team(kept, 2, (name, kind))


def test_what_differs_on_purpose() -> None:
    with lockstep.init(backend="gloo"):
        mixed = [
            nn.Parameter(torch.ones(2000)),
            nn.Parameter(torch.ones(2000, dtype=torch.float64)),
        ]
        made = lockstep.ShardedOptimizer(mixed, SGD, lr=1.0)  # torch's: one dtype only
        for each in mixed:
            each.grad = torch.ones_like(each)
        made.step()
        assert [each.unique().tolist() for each in mixed] == [[0.0], [0.0]]
        # slices in place of parameters
        assert all(each is not mixed[0] for each in made.optim.param_groups[0]["params"])
