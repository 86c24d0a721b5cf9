"""The drop-in wrapper: no_sync, exceptions, forwards through .module, and a Stepper around it."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import Tensor, nn

import lockstep
from lockstep.errors import UsageError
from lockstep.testing import run_ranks
from tests import zoo
from tests.refused import refused


def batch(rank: int, number: int = 0) -> tuple[Tensor, Tensor]:
    x, y = zoo.samples(64)
    rows = slice(8 * (rank + 4 * number), 8 * (rank + 4 * number) + 8)
    return x[rows], y[rows]


def accumulated(world: lockstep.World, backward_only: bool) -> list[Tensor]:
    model = zoo.build("mlp")
    ddp = lockstep.DistributedDataParallel(model)
    x, y = batch(world.rank, 0)
    if backward_only:
        loss = zoo.loss_sum(ddp(x), y)
        with ddp.no_sync():
            loss.backward()
    else:
        with ddp.no_sync():
            zoo.loss_sum(ddp(x), y).backward()
    x, y = batch(world.rank, 1)
    zoo.loss_sum(ddp(x), y).backward()
    return [
        parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None
    ]


@pytest.mark.parametrize("backward_only", [False, True])
def test_no_sync_keeps_gradients_at_home_until_the_next_backward(backward_only: bool) -> None:
    model = zoo.build("mlp")
    for rank in range(2):
        for number in range(2):
            x, y = batch(rank, number)
            zoo.loss_sum(model(x), y).backward()
    for found in run_ranks(accumulated, 2, args=(backward_only,)):
        for ours, parameter in zip(found, model.parameters(), strict=True):
            assert parameter.grad is not None
            assert zoo.distance(ours, parameter.grad / 2) < 1e-6


def test_no_sync_restores_the_old_state_also_after_an_exception() -> None:
    with lockstep.init():
        ddp = lockstep.DistributedDataParallel(zoo.build("mlp"))
        assert ddp._averaging is not None
        with pytest.raises(KeyError), ddp.no_sync(), ddp.no_sync():
            raise KeyError
        assert ddp._averaging.reducer.hooks.closing
        with ddp.no_sync():
            with ddp.no_sync():
                pass
            assert not ddp._averaging.reducer.hooks.closing


def through_module(world: lockstep.World) -> list[Tensor]:
    model = zoo.build("mlp")
    ddp = lockstep.DistributedDataParallel(model)
    x, y = batch(world.rank)
    zoo.loss_sum(ddp.module(x), y).backward()
    return [
        parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None
    ]


def test_a_forward_through_module_is_reduced_as_well() -> None:
    first, second = run_ranks(through_module, 2)
    assert len(first) == 6
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)


def several_forwards(world: lockstep.World) -> list[Tensor]:
    model = zoo.build("cnn")
    ddp = lockstep.DistributedDataParallel(model)
    (x, y), (u, v) = batch(world.rank, 0), batch(world.rank, 1)
    (zoo.loss_sum(ddp(x), y) + zoo.loss_sum(ddp(u), v)).backward()
    return [
        parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None
    ]


def test_several_forwards_and_one_backward() -> None:
    model = zoo.build("cnn")
    for rank in range(2):
        (x, y), (u, v) = batch(rank, 0), batch(rank, 1)
        (zoo.loss_sum(model(x), y) + zoo.loss_sum(model(u), v)).backward()
    for found in run_ranks(several_forwards, 2):
        for ours, parameter in zip(found, model.parameters(), strict=True):
            assert parameter.grad is not None
            assert zoo.distance(ours, parameter.grad / 2) < 1e-6


def grads_kept(world: lockstep.World, to_none: bool) -> list[Tensor]:
    model = zoo.build("mlp")
    ddp = lockstep.DistributedDataParallel(model, bucket_cap_mb=0.001)
    sgd = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for number in range(2):
        sgd.zero_grad(set_to_none=to_none)
        x, y = batch(world.rank, number)
        zoo.loss_sum(ddp(x), y).backward()
        sgd.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_zeroed_and_dropped_gradients_are_the_same() -> None:
    for a, b in zip(
        run_ranks(grads_kept, 2, args=(True,)), run_ranks(grads_kept, 2, args=(False,)), strict=True
    ):
        for ours, theirs in zip(a, b, strict=True):
            assert torch.equal(ours, theirs)


def inside_a_stepper(world: lockstep.World) -> list[Tensor]:
    model = zoo.build("mlp")
    ddp = lockstep.DistributedDataParallel(model)
    stepper = lockstep.Stepper(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1))
    with refused("wrapper-belongs-to-a-stepper", call="no_sync()"), ddp.no_sync():
        pass
    with refused("wrapper-belongs-to-a-stepper", call="a second Stepper"):
        lockstep.Stepper(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1))
    # one micro-batch on rank 0, two on rank 1
    rows = [batch(world.rank, number) for number in range(world.rank + 1)]
    for x, y in stepper.micro_batches(rows):
        stepper.backward(zoo.loss_sum(ddp(x), y), weight=len(y))
    assert stepper.step().weight == 24
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_a_stepper_takes_the_wrapper_and_divides_by_the_true_weight() -> None:
    model = zoo.build("mlp")
    for rank in range(2):
        for number in range(rank + 1):
            x, y = batch(rank, number)
            (zoo.loss_sum(model(x), y) / 24).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    for found in run_ranks(inside_a_stepper, 2):
        for ours, theirs in zip(found, model.parameters(), strict=True):
            assert zoo.distance(ours, theirs) < 1e-6


def test_a_wrapped_model_can_be_copied_and_saved() -> None:
    with lockstep.init():
        model = zoo.build("mlp")
        ddp = lockstep.DistributedDataParallel(model)
        x, y = batch(0)
        zoo.loss_sum(ddp(x), y).backward()
        average = copy.deepcopy(model)
        assert torch.equal(average[0].weight, model[0].weight)
        torch.save(model, io.BytesIO())
        plain = zoo.build("mlp")
        plain.load_state_dict(ddp.module.state_dict())


def weighted(world: lockstep.World) -> list[Tensor]:
    """Sums over 8 and 3 samples, the second of two backwards of each rank; divided by all."""
    model = zoo.build("mlp")
    ddp = lockstep.DistributedDataParallel(model)
    assert ddp.divisor == world.size
    rows = [8, 3][world.rank]
    x, y = batch(world.rank, 0)
    with ddp.no_sync():
        zoo.loss_sum(ddp(x), y).backward()
    ddp.divisor = 2 * 8 + 8 + 3
    x, y = batch(world.rank, 1)
    zoo.loss_sum(ddp(x[:rows]), y[:rows]).backward()
    found = [each.grad.clone() for each in model.parameters() if each.grad is not None]
    with refused("wrong-value", name="divisor"):
        ddp.divisor = 0
    ddp.register_comm_hook(None, lockstep.shared_memory_hook)
    with refused("divisor-with-hook"):
        ddp.divisor = 11
    return found


def test_the_divisor_is_the_callers() -> None:
    model = zoo.build("mlp")
    for rank, rows in enumerate((8, 3)):
        for number, count in ((0, 8), (1, rows)):
            x, y = batch(rank, number)
            zoo.loss_sum(model(x[:count]), y[:count]).backward()
    for found in run_ranks(weighted, 2):
        for ours, parameter in zip(found, model.parameters(), strict=True):
            assert parameter.grad is not None
            assert zoo.distance(ours, parameter.grad / 27) < 1e-6


def test_nonsense_arguments_are_refused() -> None:
    with lockstep.init():
        with refused("wrong-value", name="bucket_cap_mb", value=0):
            lockstep.DistributedDataParallel(zoo.build("mlp"), bucket_cap_mb=0)
        with pytest.raises(UsageError, match=r"reduce='star' .*\[unknown-choice\]"):
            lockstep.DistributedDataParallel(zoo.build("mlp"), reduce="star")
        with pytest.raises(UsageError, match="nothing to train"):
            lockstep.DistributedDataParallel(nn.ReLU())
