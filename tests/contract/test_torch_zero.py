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


def scalar() -> Tensor:
    return torch.tensor([1.0], requires_grad=True)


def small() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 10), nn.Linear(10, 10), nn.Linear(10, 5))


def close(one: nn.Module, other: nn.Module) -> None:
    torch.testing.assert_close(list(one.parameters()), list(other.parameters()))


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


def shares_are_alike(world: lockstep.World, make: Make) -> None:
    def elements(made: Any) -> int:
        return sum(each.numel() for group in made.optim.param_groups for each in group["params"])

    sizes = [9, 7, 5, 3] * world.size
    assert elements(make([torch.rand(size, 1) for size in sizes], SGD, lr=0.1)) == 24
    made = make([torch.rand(size, 1, requires_grad=True) for size in sizes[:-1]], SGD, lr=0.1)
    made.add_param_group({"params": [torch.rand(3, 1)]})
    assert (len(made.param_groups), len(made.optim.param_groups), elements(made)) == (2, 2, 24)


# -- stepping ------------------------------------------------------------------------------------


class Noting(SGD):
    def step(self, closure: Any = None, noted: list[Any] | None = None) -> None:  # type: ignore[override]
        super().step()
        assert noted is not None
        noted.append(closure)


class Writing(SGD):
    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        self.param_groups[0]["written"] = 0.25


def hands_on_what_step_is_given_and_what_it_notes(world: lockstep.World, make: Make) -> None:
    noted: list[Any] = []
    for kind, arguments, options in (
        (Noting, (7,), {"noted": noted}),
        (Writing, (), {}),
    ):
        weight = scalar()
        made = make([weight], optimizer_class=kind, lr=0.1)
        weight.sum().backward()
        made.step(*arguments, **options)
        torch.testing.assert_close(weight.detach(), torch.tensor([0.9]))
    assert noted == [7]
    assert made.param_groups[0]["written"] == 0.25


def works_with_fewer_parameters_than_ranks(world: lockstep.World, make: Make) -> None:
    weight = scalar()
    made = make([weight], Adam, lr=0.1)
    weight.square().sum().backward()
    made.step()
    made.consolidate_state_dict(to=1)
    if world.rank == 1:
        assert list(made.state_dict()["state"]) == [0]
    torch.testing.assert_close(weight.detach(), torch.tensor([0.9]))


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
    with pytest.raises(RuntimeError):
        made.state_dict()
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
    assert (group["momentum"], group["nesterov"], group["params"]) == (0.9, False, [0])
    assert all(group[name] == made.param_groups[0][name] for name in group if name != "params")
    other = make([weight], SGD, lr=0.7)
    other.load_state_dict(states[0])
    assert other.param_groups[0]["lr"] == 0.1
    weight.grad = torch.ones(1)
    other.step()
    torch.testing.assert_close(weight.detach(), torch.tensor([0.71]))


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


def kept(world: lockstep.World, check: Callable[[lockstep.World, Make], None], kind: str) -> None:
    check(world, maker(kind))


@pytest.mark.parametrize("kind", ["lockstep", pytest.param("torch", marks=pytest.mark.rest)])
@pytest.mark.parametrize(
    "check",
    [
        refuses_what_are_no_parameters,
        shares_are_alike,
        hands_on_what_step_is_given_and_what_it_notes,
        works_with_fewer_parameters_than_ranks,
        works_with_optimizers_that_are_not_elementwise,
        state_has_torchs_form_and_comes_back,
        equals_the_local_optimizer_under_ddp,
    ],
    ids=lambda check: check.__name__,
)
def test_both_keep_the_contract(check: Callable[[lockstep.World, Make], None], kind: str) -> None:
    on_team(kept, 2, (check, kind))


def test_what_differs_on_purpose() -> None:
    with lockstep.init(backend="gloo"):
        dtypes = (torch.float32, torch.float64)
        mixed = [nn.Parameter(torch.ones(2000, dtype=dtype)) for dtype in dtypes]
        made = lockstep.ShardedOptimizer(mixed, SGD, lr=1.0)  # torch's: one dtype only
        for parameter in mixed:
            parameter.grad = torch.ones_like(parameter)
        made.step()
        assert [each.unique().tolist() for each in mixed] == [[0.0], [0.0]]
        # slices in place of parameters
        assert all(each is not mixed[0] for each in made.optim.param_groups[0]["params"])
