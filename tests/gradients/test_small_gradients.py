"""From a Stepper's second window on, autograd adds small gradients up in their places and only
leaves a note: what a hook would see of each must still be seen. So does a wrapper from its second
step on, and copies them together.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lockstep
from lockstep.errors import LateGradient, LockstepWarning, UnusedParameters
from tests import zoo
from tests.refused import refused
from tests.step.walking import walk, weights
from tests.teams import on_team


@pytest.fixture
def world() -> Iterator[lockstep.World]:
    with lockstep.init() as world:
        yield world


def window(count: int = 2) -> list[tuple[Tensor, Tensor]]:
    x, y = zoo.samples(count * 4)
    return list(zip(x.split(4), y.split(4), strict=True))


def learned(model: nn.Module, **options: Any) -> lockstep.Stepper:
    """A Stepper that has taken the steps after which it knows the order of gradients."""
    stepper = lockstep.Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1), **options)
    for _ in range(2):
        walk(stepper, window())
    return stepper


def one_step(model: nn.Module) -> nn.Module:
    """What one process makes of a copy in the same window."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.zero_grad()
    for x, y in window():
        (zoo.loss_sum(model(x), y) / 8).backward()
    optimizer.step()
    return model


def check_equal(model: nn.Module, expected: nn.Module) -> None:
    torch.testing.assert_close(weights(model), weights(expected), rtol=1e-5, atol=1e-6)


def test_gradients_that_somebody_clears_before_they_land_are_counted(world: lockstep.World) -> None:
    model = zoo.build("mlp")
    stepper, expected = learned(model), one_step(model)
    for number, (x, y) in enumerate(stepper.micro_batches(window())):
        if number == 0:
            stepper.optimizer.zero_grad()
        stepper.backward(zoo.loss_sum(model(x), y), weight=4)
    stepper.step()
    check_equal(model, expected)
    stepper.optimizer.zero_grad()  # nor does this hurt the next window
    expected = one_step(model)
    walk(stepper, window())
    check_equal(model, expected)


def test_gradients_that_somebody_takes_away_are_named(world: lockstep.World) -> None:
    """Between micro-batches; and by a hook in the only one of a window: nothing lands after it."""
    model = zoo.build("mlp")
    stepper = learned(model)
    with refused("gradient-cleared"):
        for x, y in stepper.micro_batches(window()):
            stepper.backward(zoo.loss_sum(model(x), y), weight=4)
            model[2].bias.grad = None
    model = zoo.build("mlp")
    stepper = learned(model)

    def take_away(parameter: Tensor) -> None:
        parameter.grad = None

    model[2].bias.register_post_accumulate_grad_hook(take_away)
    with refused("gradient-cleared"):
        walk(stepper, window(1))


@pytest.mark.parametrize("reaches", ["every parameter", "one small parameter"])
def test_a_backward_of_the_users_own_is_seen(world: lockstep.World, reaches: str) -> None:
    model = zoo.build("mlp")
    stepper = learned(model)
    for x, y in stepper.micro_batches(window()):
        small = reaches == "one small parameter"
        (model[-1].bias.sum() if small else zoo.loss_sum(model(x), y)).backward()
    with refused("backward-not-by-stepper"):
        stepper.step()


def test_a_window_whose_backwards_reach_one_small_parameter(world: lockstep.World) -> None:
    model = zoo.build("mlp")
    stepper = learned(model, unused="skip")
    before = weights(model)
    for _ in stepper.micro_batches(window()):
        stepper.backward(3 * model[-1].bias.sum(), weight=4)
    stepper.step()
    moved = [old - new for old, new in zip(before, model.parameters(), strict=True)]
    assert not any(difference.any() for difference in moved[:-1])
    torch.testing.assert_close(moved[-1], torch.full_like(moved[-1], 0.1 * 2 * 3 / 8))


@pytest.mark.parametrize("unused", ["error", "skip", "zeros"])
def test_the_last_backward_of_a_window_may_end_with_one_small_parameter(
    world: lockstep.World, unused: str
) -> None:
    """Which no other backward reaches."""
    model = zoo.build("mlp")
    stepper = learned(model, unused=unused)
    before = model[2].bias.detach().clone()
    for number, (x, y) in enumerate(stepper.micro_batches(window())):
        if number == 0:
            out = nn.functional.linear(model[:2](x), model[2].weight, model[2].bias.detach())
            stepper.backward(zoo.loss_sum(model[3:](out), y), weight=4)
        else:
            stepper.backward(5 * model[2].bias.sum(), weight=4)
    stepper.step()
    torch.testing.assert_close(before - model[2].bias, torch.full_like(before, 0.1 * 5 / 8))


def test_gradients_of_the_first_micro_batch_alone_count(world: lockstep.World) -> None:
    """Also that of a bucket's last parameter, whose hook waits for the last micro-batch."""
    model = zoo.build("mlp")
    stepper, expected = learned(model), copy.deepcopy(model)
    x, y = window()[0]
    ((zoo.loss_sum(expected(x), y) + expected[-1].bias.sum()) / 8).backward()
    for number, (x, y) in enumerate(stepper.micro_batches(window())):
        loss = model[-1].bias.sum() if number else zoo.loss_sum(model(x), y)
        stepper.backward(loss, weight=4)
    stepper.step()
    torch.optim.SGD(expected.parameters(), lr=0.1).step()
    check_equal(model, expected)


def test_what_a_stray_backward_leaves_between_windows_is_forgotten(world: lockstep.World) -> None:
    model = zoo.build("mlp")
    stepper, expected = learned(model), one_step(model)
    for x, y in window():
        zoo.loss_sum(model(x), y).backward()
    walk(stepper, window())
    check_equal(model, expected)


class Branches(nn.Module):
    """Which layer is used is said from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 3) for _ in range(3))
        self.used = {0, 1, 2}

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.layers[number](x) for number in sorted(self.used)]).sum(0)


def test_a_parameter_that_is_unused_for_a_window_is_an_error_or_has_no_gradient(
    world: lockstep.World,
) -> None:
    torch.manual_seed(0)
    model = Branches()
    stepper = learned(model)
    model.used = {0, 2}
    with pytest.raises(UnusedParameters) as caught:
        walk(stepper, window())
    assert caught.value.values["names"] == ["layers.1.weight", "layers.1.bias"]
    model = Branches()
    stepper = learned(model, unused="skip")
    for used in ({0, 2}, {0, 1, 2}):
        model.used = used
        expected = one_step(model)
        expected_used = [number in used for number in range(3)]
        walk(stepper, window())
        assert [layer.weight.grad is not None for layer in model.layers] == expected_used
        check_equal(model, expected)


class Checkpointed(nn.Module):
    """One layer, used inside reentrant checkpoints: its gradients land as often."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(6, 6), nn.Linear(6, 3)
        self.times = 1

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        for _ in range(self.times):
            x = checkpoint(self.inner, x, use_reentrant=True)
        out: Tensor = self.head(x)
        return out


def test_a_gradient_that_lands_after_its_bucket_has_left_is_named(world: lockstep.World) -> None:
    torch.manual_seed(0)
    model = Checkpointed()
    stepper = learned(model)
    model.times = 2
    with pytest.raises(LateGradient) as caught:
        walk(stepper, window())
    assert caught.value.values["parameter"].startswith("inner.")


def test_sparse_gradients_are_added_to_dense_places(world: lockstep.World) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(9, 3, sparse=True), nn.Linear(3, 3))
    stepper = lockstep.Stepper(model, torch.optim.SGD(model.parameters(), lr=1.0))
    rows = [torch.tensor([1, 2, 2]), torch.tensor([2, 8])]
    for step in range(3):
        expected = copy.deepcopy(model)
        for part in rows:
            expected(part).sum().backward()
        warned = pytest.warns(LockstepWarning, match="the gradient of '0.weight' is sparse")
        with warned if step == 0 else nullcontext():
            for part in stepper.micro_batches(rows):
                stepper.backward(model(part).sum(), weight=1)
        before = model[0].weight.detach().clone()
        stepper.step()
        torch.testing.assert_close(before - model[0].weight, expected[0].weight.grad.to_dense() / 2)


def test_a_nan_in_a_small_gradient_is_traced(world: lockstep.World) -> None:
    model = zoo.build("mlp")
    stepper = learned(model, trace_nonfinite=True, clip=1.0)
    for number, (x, y) in enumerate(stepper.micro_batches(window())):
        loss = zoo.loss_sum(model(x), y)
        if number == 1:
            model[2].weight.register_hook(lambda gradient: gradient * torch.nan)
        stepper.backward(loss, weight=4)
    with pytest.warns(LockstepWarning, match="skipped"):
        result = stepper.step()
    assert "'2.weight' on rank 0 (micro-batch 1 of its window)" in (result.reason or "")


def test_a_gradient_set_by_hand_is_not_skipped(world: lockstep.World) -> None:
    torch.manual_seed(0)
    model = Branches()
    stepper = learned(model, unused="skip")
    model.used = {0, 2}
    bias = model.layers[1].bias
    before = bias.detach().clone()
    for x, y in stepper.micro_batches(window()):
        stepper.backward(zoo.loss_sum(model(x), y), weight=4)
    bias.grad = torch.full_like(bias, 8.0)
    stepper.step()
    assert (before - bias).gt(0).all()


# -- the wrapper ----------------------------------------------------------------------------------


def usual(ddp: nn.Module, loss: Any) -> None:
    loss(0).backward()


def accumulated(ddp: Any, loss: Any) -> None:
    with ddp.no_sync():
        loss(0).backward()
    loss(1).backward()


def accumulated_and_cleared(ddp: Any, loss: Any) -> None:
    with ddp.no_sync():
        loss(0).backward()
    ddp.zero_grad()
    loss(1).backward()


def one_small_parameter(ddp: Any, loss: Any) -> None:
    with ddp.no_sync():
        loss(0).backward()
    (3 * ddp.module[2].bias.sum()).backward()


def by_autograd_grad(ddp: Any, loss: Any) -> None:
    torch.autograd.grad(loss(0), ddp.module[2].bias)
    loss(1).backward()


def accumulated_until_one_is_trained(ddp: Any, loss: Any) -> None:
    bias = ddp.module[2].bias
    bias.requires_grad_(False)
    for _ in range(2):
        loss(0).backward()
        ddp.zero_grad()
    with ddp.no_sync():
        loss(0).backward()
    bias.requires_grad_()
    loss(1)
    (3 * bias.sum()).backward()


WAYS = (
    usual,
    accumulated,
    accumulated_until_one_is_trained,
    accumulated_and_cleared,
    one_small_parameter,
    by_autograd_grad,
)


class Alone(nn.Module):
    """A model that a process trains by itself, as a wrapper is used."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.no_sync = nullcontext

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.module(x)
        return out


def gradients(model: Any, way: Any, rank: int) -> list[Tensor | None]:
    def loss(number: int) -> Tensor:
        x, y = zoo.batch(rank, number)
        return zoo.loss_sum(model(x), y)

    model.zero_grad()
    way(model, loss)
    return [None if p.grad is None else p.grad.clone() for p in model.module.parameters()]


def wrapped(world: lockstep.World, unused: bool) -> list[list[Tensor | None]]:
    results = []
    for way in WAYS:
        ddp = lockstep.DistributedDataParallel(zoo.build("mlp"), find_unused_parameters=unused)
        for _ in range(2):  # after which the order of gradients is known
            gradients(ddp, usual, world.rank)
        assert ddp._averaging is not None
        assert len(ddp._averaging.reducer._small) == len(list(ddp.parameters()))
        results.append(gradients(ddp, way, world.rank))
    return results


@pytest.mark.parametrize("unused", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_wrappers_small_gradients_are_those_of_one_process(size: int, unused: bool) -> None:
    expected = []
    for way in WAYS:
        of_ranks = [gradients(Alone(zoo.build("mlp")), way, rank) for rank in range(size)]
        expected.append(
            [None if g[0] is None else sum(g) / size for g in zip(*of_ranks, strict=True)]
        )
    for results in on_team(wrapped, size, (unused,)):
        for way, result, one in zip(WAYS, results, expected, strict=True):
            for ours, theirs in zip(result, one, strict=True):
                if theirs is None:
                    assert ours is None, way.__name__
                else:
                    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def run_out(world: lockstep.World) -> list[Tensor]:
    """Rank 0 has one batch more; what rank 1 has computed last has only accumulated."""
    model = zoo.build("mlp")
    ddp = lockstep.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    with ddp.join():
        for number in range(5 - world.rank):
            x, y = zoo.batch(world.rank, number)
            with ddp.no_sync() if number == 3 else nullcontext():
                zoo.loss_sum(ddp(x), y).backward()
            if number != 3:
                optimizer.step()
                optimizer.zero_grad()
    return weights(model)


def test_a_rank_whose_inputs_end_with_accumulated_gradients_takes_part() -> None:
    first, second = on_team(run_out, 2)
    torch.testing.assert_close(first, second)


def with_a_hook_that_clears(world: lockstep.World) -> list[Tensor | None]:
    ddp = lockstep.DistributedDataParallel(zoo.build("mlp"), find_unused_parameters=True)
    for _ in range(2):
        gradients(ddp, usual, world.rank)

    def take_away(parameter: Tensor) -> None:
        parameter.grad = None

    ddp.module[2].bias.register_post_accumulate_grad_hook(take_away)
    return gradients(ddp, usual, world.rank)


def test_a_gradient_that_a_hook_takes_from_a_wrapper_ends_no_step() -> None:
    first, second = on_team(with_a_hook_that_clears, 2)
    for one, other in zip(first, second, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other)


def with_a_graph(world: lockstep.World) -> list[bool]:
    """A backward that leaves out the last parameter of the bucket, with create_graph."""
    ddp: Any = lockstep.DistributedDataParallel(zoo.build("mlp"))
    for _ in range(2):
        gradients(ddp, usual, world.rank)
    ddp.zero_grad()
    with ddp.no_sync():
        zoo.loss_sum(ddp(zoo.batch(world.rank)[0]), zoo.batch(world.rank)[1]).backward()
    with pytest.warns(LockstepWarning, match="has no graph"):
        (ddp.module[2].bias.square().sum()).backward(create_graph=True)
    return [parameter.grad.requires_grad for parameter in ddp.parameters()]


def test_a_wrappers_small_gradients_have_no_graph() -> None:
    for results in on_team(with_a_graph, 2):
        assert not any(results)
