"""What torch's DDP does in silence (cases M1 to M6): here each is an error that names it
within the step, or trains right.
"""

from __future__ import annotations

import re
import warnings

import pytest
import torch
from torch import Tensor, nn

import lockstep
from lockstep.errors import LockstepWarning, ReplicaDivergence, UnusedParameters
from tests import zoo
from tests.teams import on_team


def batch(rank: int, number: int) -> tuple[Tensor, Tensor]:
    x, y = zoo.samples(512)
    rows = slice(4 * (2 * number + rank), 4 * (2 * number + rank) + 4)
    return x[rows], y[rows]


def same_everywhere(model: nn.Module) -> bool:
    for tensor in model.state_dict().values():
        rows = lockstep.collectives.all_gather(tensor.reshape(1, -1))
        if not all(torch.equal(row, rows[0]) for row in rows):
            return False
    return True


def modulo(world: lockstep.World) -> tuple[str, int]:
    """M1: no_sync when i % 4 != 0, step when (i + 1) % 4 == 0."""
    model = zoo.build("mlp")
    ddp = lockstep.DistributedDataParallel(model)
    sgd = torch.optim.SGD(ddp.parameters(), lr=0.1)
    try:
        for i in range(64):
            x, y = batch(world.rank, i)
            if i % 4 != 0:
                with ddp.no_sync():
                    zoo.loss_sum(ddp(x), y).backward()
            else:
                zoo.loss_sum(ddp(x), y).backward()
            if (i + 1) % 4 == 0:
                sgd.step()
                sgd.zero_grad()
    except ReplicaDivergence as error:
        return str(error), i
    return "nothing said", i


def test_m1_no_sync_by_the_wrong_modulo_is_found_by_the_second_check() -> None:
    for message, step in on_team(modulo, 2):
        assert re.match(
            r"after step 1 '0\.weight' differs between rank 0 and rank 1 \(\d+ of \d+ elements,"
            r" .*\)\. 6 of 6 tensors differ: also '0\.bias'",
            message,
        )
        assert step == 4  # the first forward that is to be reduced after the step that parted them


def through_module(world: lockstep.World) -> bool:
    """M3: a forward through .module."""
    model = zoo.build("mlp")
    ddp = lockstep.DistributedDataParallel(model)
    sgd = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for i in range(4):
        sgd.zero_grad()
        x, y = batch(world.rank, i)
        zoo.loss_sum(ddp.module(x), y).backward()
        sgd.step()
    return same_everywhere(model)


def test_m3_a_forward_through_module_trains_right() -> None:
    assert on_team(through_module, 2) == [True, True]


class WithHead(nn.Module):
    def __init__(self, use: bool = False) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.body = nn.Linear(6, 3)
        self.aux_head = nn.Linear(6, 3)
        self.use = use

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) + self.aux_head(x) if self.use else self.body(x)


def train_step(stepper: lockstep.Stepper, model: nn.Module, rank: int, number: int) -> None:
    for x, y in stepper.micro_batches([batch(rank, number)]):
        stepper.backward(zoo.loss_sum(model(x), y), weight=4)
    stepper.step()


def unused(world: lockstep.World, door: str) -> str:
    """M4: one layer gets no gradient."""
    model = WithHead()
    before = model.body.weight.detach().clone()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        if door == "wrapper":
            x, y = batch(world.rank, 0)
            zoo.loss_sum(lockstep.DistributedDataParallel(model)(x), y).backward()
            sgd.step()
        else:
            train_step(lockstep.Stepper(model, sgd), model, world.rank, 0)
    except UnusedParameters as error:
        assert torch.equal(model.body.weight, before)  # the error came before the step
        return str(error)
    return "nothing said"


@pytest.mark.parametrize("door", ["wrapper", "stepper"])
def test_m4_unused_parameters_are_named_before_the_step(door: str) -> None:
    for message in on_team(unused, 2, args=(door,)):
        assert message.startswith("'aux_head.weight', 'aux_head.bias' got no gradient ")
        assert message.endswith(" [unused-parameters]")


def used_by_some(world: lockstep.World) -> tuple[list[str], bool, float]:
    model = WithHead(use=world.rank == 1)
    stepper = lockstep.Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1))
    said = []
    for number in range(3):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            train_step(stepper, model, world.rank, number)
        said += [str(warning.message) for warning in caught if warning.category is LockstepWarning]
    assert model.aux_head.weight.grad is not None
    return said, same_everywhere(model), model.aux_head.weight.grad.abs().sum().item()


def test_a_parameter_used_by_some_is_averaged_with_zeros_and_said_once() -> None:
    first, second = on_team(used_by_some, 2)
    assert first[0] == [
        "'aux_head.weight', 'aux_head.bias' got no gradient on rank 0: the mean counts zeros there. This warning appears once."
    ]
    assert second[0] == []
    assert first[1]
    assert second[1]
    assert first[2] == second[2] > 0


def unfrozen(world: lockstep.World, door: str) -> bool:
    """M5 and M6: a layer unfrozen, a layer added, after wrapping."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
    model[0].requires_grad_(False)
    ddp = lockstep.DistributedDataParallel(model)
    stepper = (
        lockstep.Stepper(ddp, torch.optim.SGD(model.parameters(), lr=0.1))
        if door == "stepper"
        else None
    )
    sgd = stepper.optimizer if stepper else torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(6):
        if number == 2:
            model[0].requires_grad_(True)
        if number == 4:
            torch.manual_seed(world.rank)  # each rank initialises its own
            model.append(nn.Linear(3, 3))
            sgd.add_param_group({"params": list(model[3].parameters())})
        if stepper is not None:
            train_step(stepper, ddp, world.rank, number)
        else:
            x, y = batch(world.rank, number)
            sgd.zero_grad()
            zoo.loss_sum(ddp(x), y).backward()
            sgd.step()
    assert all(
        parameter.grad is not None and parameter.grad.abs().sum() > 0
        for parameter in model.parameters()
    )
    return same_everywhere(model)


@pytest.mark.parametrize("door", ["wrapper", "stepper"])
def test_m5_m6_unfreezing_and_adding_after_wrapping_train_right(door: str) -> None:
    assert on_team(unfrozen, 2, args=(door,)) == [True, True]
