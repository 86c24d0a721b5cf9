"""The drop-in wrapper: no_sync, exceptions, forwards through .module, and a Stepper around it."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import ExitStack

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

import lockstep
from tests import zoo
from tests.refused import refused
from tests.step.walking import gradients, same, walk, weights
from tests.teams import on_team
from tests.zoo import batch


@pytest.fixture
def world() -> Iterator[lockstep.World]:
    with lockstep.init(backend="gloo") as world:
        yield world


def expected(divisor: int, rows: Sequence[int]) -> dict[str, Tensor]:
    """The gradients of one process over two batches of each rank; `rows`: how many of its second
    each rank takes.
    """
    model = zoo.build("mlp")
    for rank, count in enumerate(rows):
        (x, y), (u, v) = batch(rank, 0), batch(rank, 1)
        (zoo.loss_sum(model(x), y) / divisor).backward()
        (zoo.loss_sum(model(u[:count]), v[:count]) / divisor).backward()
    return gradients(model)


def accumulated(world: lockstep.World, how: str) -> dict[str, Tensor]:
    model = zoo.build("mlp")
    ddp = lockstep.DistributedDataParallel(model)
    (x, y), (u, v) = batch(world.rank, 0), batch(world.rank, 1)
    if how == "a forward through .module":
        (zoo.loss_sum(ddp(x), y) + zoo.loss_sum(ddp.module(u), v)).backward()
        return gradients(model)
    if how == "no_sync around the backward":
        loss = zoo.loss_sum(ddp(x), y)
        with ddp.no_sync():
            loss.backward()
    else:
        with ddp.no_sync():
            zoo.loss_sum(ddp(x), y).backward()
    zoo.loss_sum(ddp(u), v).backward()
    return gradients(model)


@pytest.mark.parametrize(
    "how", ["no_sync", "no_sync around the backward", "a forward through .module"]
)
def test_gradients_of_several_forwards_are_the_mean_over_ranks(how: str) -> None:
    """no_sync keeps gradients until the next backward; a forward through .module is reduced too."""
    for ours in on_team(accumulated, 3, (how,)):
        for name, theirs in expected(divisor=3, rows=(4, 4, 4)).items():
            assert zoo.distance(ours[name], theirs) < 1e-6, name


def test_no_sync_restores_the_old_state_also_after_an_exception(world: lockstep.World) -> None:
    ddp = lockstep.DistributedDataParallel(zoo.build("mlp"))
    assert ddp._averaging is not None
    with pytest.raises(KeyError), ddp.no_sync(), ddp.no_sync():
        raise KeyError
    assert ddp._averaging.reducer.closing
    with ddp.no_sync():
        with ddp.no_sync():
            pass
        assert not ddp._averaging.reducer.closing


def two_steps(world: lockstep.World, to_none: bool) -> list[Tensor]:
    model = zoo.build("mlp")
    ddp = lockstep.DistributedDataParallel(model, bucket_cap_mb=0.001)
    sgd = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for number in range(2):
        sgd.zero_grad(set_to_none=to_none)
        x, y = batch(world.rank, number)
        zoo.loss_sum(ddp(x), y).backward()
        sgd.step()
    return weights(model)


def test_zeroed_and_dropped_gradients_are_the_same() -> None:
    assert same(on_team(two_steps, 2, (True,)), on_team(two_steps, 2, (False,)))


def inside_a_stepper(world: lockstep.World) -> list[Tensor]:
    """One micro-batch on rank 0, two on rank 1."""
    model = zoo.build("mlp")
    ddp = lockstep.DistributedDataParallel(model)
    stepper = lockstep.Stepper(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1))
    with refused("wrapper-belongs-to-a-stepper", call="no_sync()"), ddp.no_sync():
        pass
    with refused("wrapper-belongs-to-a-stepper", call="a second Stepper"):
        lockstep.Stepper(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1))
    result = walk(stepper, [batch(world.rank, number) for number in range(world.rank + 1)])
    assert result.weight == 12
    return weights(model)


def test_a_stepper_takes_the_wrapper_and_divides_by_the_true_weight() -> None:
    model = zoo.build("mlp")
    for x, y in (batch(0, 0), batch(1, 0), batch(1, 1)):
        (zoo.loss_sum(model(x), y) / 12).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    for trained in on_team(inside_a_stepper, 2):
        for ours, theirs in zip(trained, model.parameters(), strict=True):
            assert zoo.distance(ours, theirs) < 1e-6


def weighted(world: lockstep.World) -> dict[str, Tensor]:
    """Sums over 4 and 3 samples, the second of two backwards of each rank; divided by all."""
    model = zoo.build("mlp")
    ddp = lockstep.DistributedDataParallel(model)
    assert ddp.divisor == world.size
    rows = [4, 3][world.rank]
    x, y = batch(world.rank, 0)
    with ddp.no_sync():
        zoo.loss_sum(ddp(x), y).backward()
    ddp.divisor = 2 * 4 + 4 + 3
    x, y = batch(world.rank, 1)
    zoo.loss_sum(ddp(x[:rows]), y[:rows]).backward()
    reduced = gradients(model)
    with refused("wrong-value", name="divisor"):
        ddp.divisor = 0
    ddp.register_comm_hook(None, lockstep.shared_memory_hook)
    with refused("divisor-with-hook"):
        ddp.divisor = 11
    return reduced


def collect(*_: object) -> None:
    gc.collect()


def test_an_optimizer_may_step_while_a_dropped_wrapper_is_collected(world: lockstep.World) -> None:
    lockstep.DistributedDataParallel(zoo.build("mlp"))
    optimizer = torch.optim.SGD(zoo.build("mlp").parameters(), 0.1)
    with ExitStack() as hooks:
        for _ in range(2):  # the second is called after the first has collected the wrapper
            hooks.callback(register_optimizer_step_post_hook(collect).remove)
        optimizer.step()


def test_the_divisor_is_the_callers() -> None:
    for ours in on_team(weighted, 2):
        for name, theirs in expected(divisor=15, rows=(4, 3)).items():
            assert zoo.distance(ours[name], theirs) < 1e-6, name


def test_nonsense_arguments_are_refused(world: lockstep.World) -> None:
    with refused("wrong-value", name="bucket_cap_mb", value=0):
        lockstep.DistributedDataParallel(zoo.build("mlp"), bucket_cap_mb=0)
    with refused("unknown-choice", name="reduce", value="star"):
        lockstep.DistributedDataParallel(zoo.build("mlp"), reduce="star")
    with refused("no-trainable-parameter"):
        lockstep.DistributedDataParallel(nn.ReLU())
