"""What a caller may do to a step: the calls of a WindowRun, against `micro_batches` and `backward`."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import lockstep
from tests.refused import refused
from tests.teams import on_team

Batch = tuple[Tensor, Tensor]


class Net(nn.Sequential):
    """With BatchNorm and dropout: buffers that move, and random streams."""

    def __init__(self) -> None:
        super().__init__(
            nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3)
        )


def batches(rank: int, step: int, count: int) -> list[Batch]:
    """Micro-batches of different sizes, different on every rank."""
    generator = torch.Generator().manual_seed(100 * rank + step)
    made = []
    for size in range(2, 2 + count):
        x = torch.randn(size, 6, generator=generator)
        made.append((x, torch.randint(3, (size,), generator=generator)))
    return made


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="sum")


def stepper_of(model: nn.Module, world: lockstep.World) -> lockstep.Stepper:
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    return lockstep.Stepper(model, optimizer, clip=1.0, world=world)


def state_of(model: nn.Module) -> list[Tensor]:
    return [tensor.clone() for tensor in model.state_dict().values()]


def by_the_loop(stepper: lockstep.Stepper, window: Sequence[Batch]) -> None:
    for batch in stepper.micro_batches(window):
        stepper.backward(loss_of(stepper.model, batch), weight=len(batch[1]))


def by_hand(stepper: lockstep.Stepper, window: Sequence[Batch], counted: str) -> None:
    run = stepper.open(window)
    for index, batch in enumerate(window):
        run.begin(index, batch, last=index == len(window) - 1)
        loss = loss_of(stepper.model, batch)
        if counted == "before":
            factor = run.count(loss, len(batch[1]))
            assert factor == 1
        with run.backward():
            loss.backward()
        if counted == "after":
            run.count(loss, len(batch[1]))
        run.end()
        assert not run.completed
    if counted == "before":
        facts, _ = run.complete()
        assert run.completed
        assert run.complete()[0] is facts


def driven(world: lockstep.World, counted: str) -> None:
    torch.manual_seed(0)
    model = Net()
    other = copy.deepcopy(model)
    stepper, by_calls = stepper_of(model, world), stepper_of(other, world)
    for step in range(4):
        window = batches(world.rank, step, 0 if world.rank == 2 else 3 - world.rank)
        by_the_loop(stepper, window)
        expected = stepper.step()
        by_hand(by_calls, window, counted)
        result = by_calls.step()
        assert (result.loss, result.weight) == (expected.loss, expected.weight)
        for tensor, same in zip(state_of(other), state_of(model), strict=True):
            assert torch.equal(tensor, same)


@pytest.mark.parametrize("counted", ["before", "after"])
@pytest.mark.parametrize("workers", [1, 3])
def test_the_calls_do_what_the_loop_does(workers: int, counted: str) -> None:
    """A rank may be idle; a weight may be known after the backward only."""
    on_team(driven, workers, (counted,))


def driven_exactly(world: lockstep.World, counted: str) -> None:
    torch.manual_seed(0)
    model = Net()
    other = copy.deepcopy(model)
    data = TensorDataset(*batches(0, 0, 40)[-1])
    options = {"global_batch": 12, "micro_batch": 3, "seed": 0}
    pairs = [(model, by_the_loop), (other, partial(by_hand, counted=counted))]
    for trained, drive in pairs:
        optimizer = torch.optim.AdamW(trained.parameters(), 0.01)
        stepper = lockstep.Stepper(trained, optimizer, exact=True, world=world)
        for window in next(iter(lockstep.Loader(data, **options).epochs(1))):
            before = torch.get_rng_state()
            drive(stepper, window)
            stepper.step()
            assert torch.equal(torch.get_rng_state(), before)
    for tensor, same in zip(state_of(other), state_of(model), strict=True):
        assert torch.equal(tensor, same)


@pytest.mark.parametrize("counted", ["before", "after"])
def test_also_in_exact_mode(counted: str) -> None:
    on_team(driven_exactly, 2, (counted,))


def discarded(world: lockstep.World) -> None:
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    other = copy.deepcopy(model)
    stepper, by_calls = stepper_of(model, world), stepper_of(other, world)
    for step in range(3):
        window = batches(world.rank, step, 3)
        bad = {0} if world.rank == 1 else set()
        if step == 1:
            bad = {0, 1, 2} if world.rank == 0 else set()
        by_the_loop(stepper, [window[index] for index in range(3) if index not in bad])
        expected = stepper.step()
        run = by_calls.open(window)
        for index, batch in enumerate(window):
            run.begin(index, batch, last=index == 2)
            if index in bad:
                run.discard()
                continue
            loss = loss_of(other, batch)
            run.count(loss, len(batch[1]))
            with run.backward():
                loss.backward()
            run.end()
        result = by_calls.step()
        assert (result.loss, result.weight) == (expected.loss, expected.weight)
        for tensor, same in zip(state_of(other), state_of(model), strict=True):
            assert torch.equal(tensor, same)


def test_a_discarded_micro_batch_is_none_of_the_step() -> None:
    on_team(discarded, 2)


def misused(world: lockstep.World) -> None:
    model = Net()
    stepper = stepper_of(model, world)
    with refused("not-a-window"):
        stepper.open(3)  # type: ignore[arg-type]
    window = batches(world.rank, 0, 1)
    run = stepper.open(window)
    with refused("window-still-open"):
        stepper.open(window)
    with refused("micro-batch-counted"):
        run.discard()
    run.begin(0, last=True)
    run.count(loss_of(model, window[0]), 2)
    with refused("micro-batch-counted"):
        run.discard()
    with refused("step-inside-window"):
        stepper.step()


def test_what_a_step_does_not_allow_is_refused() -> None:
    on_team(misused, 1)
