"""Replicas that differ are found where it counts, whatever differs in them: tensor, rank and
step are named on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import lockstep
from lockstep.errors import ReplicaDivergence
from lockstep.testing import run_ranks

LAST_BIT = 0  # of a mantissa


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def flip(tensor: Tensor, element: int = 0, bit: int = LAST_BIT) -> None:
    tensor.data.view(-1).view(torch.int32)[element] ^= 1 << bit


def step_of(stepper: lockstep.Stepper, world: lockstep.World, number: int) -> None:
    generator = torch.Generator().manual_seed(100 * number + world.rank)
    for x in stepper.micro_batches([torch.randn(4, 3, generator=generator)]):
        stepper.backward(stepper.model(x).square().sum(), weight=4)
    stepper.step()


def stepper_of(world: lockstep.World, update: str = "replicated") -> lockstep.Stepper:
    model = model_of()
    return lockstep.Stepper(
        model, torch.optim.AdamW(model.parameters(), lr=1e-3), update=update, world=world
    )


Where = Callable[[lockstep.Stepper], Tensor]


def weight(stepper: lockstep.Stepper) -> Tensor:
    return stepper.model[2].weight


def statistics(stepper: lockstep.Stepper) -> Tensor:
    return stepper.model[1].running_var


def first_moment(stepper: lockstep.Stepper) -> Tensor:
    return stepper.optimizer.state[stepper.model[0].bias]["exp_avg"]


def second_moment(stepper: lockstep.Stepper) -> Tensor:
    return stepper.optimizer.state[stepper.model[0].bias]["exp_avg_sq"]


def count(stepper: lockstep.Stepper) -> Tensor:
    return stepper.optimizer.state[stepper.model[0].bias]["step"]


NAMES = {
    "2.weight": weight,
    "1.running_var": statistics,
    "exp_avg/0.bias": first_moment,
    "exp_avg_sq/0.bias": second_moment,
    "step/0.bias": count,
}


def found(stepper: lockstep.Stepper) -> tuple[str, tuple[int, ...]] | None:
    try:
        stepper.check_replicas()
    except ReplicaDivergence as error:
        return error.parameter, error.ranks
    return None


def one_bit_each(world: lockstep.World, odd: int) -> list[object]:
    stepper = stepper_of(world)
    told: list[object] = []
    for number in range(3):
        step_of(stepper, world, number)
    for where in NAMES.values():
        told.append(found(stepper))
        tensor = where(stepper)
        if world.rank == odd:
            flip(tensor)
        told.append(found(stepper))
        if world.rank == odd:
            flip(tensor)
    return told


@pytest.mark.parametrize(("workers", "odd", "ranks"), [(2, 1, (1,)), (3, 0, (0,)), (3, 2, (2,))])
def test_one_low_bit_of_anything_replicated_is_found_and_named(
    workers: int, odd: int, ranks: tuple[int, ...]
) -> None:
    """With three ranks the one that differs from the two others is named, also where it is rank
    0.
    """
    expected = [each for name in NAMES for each in (None, (name, ranks))]
    assert run_ranks(one_bit_each, workers, (odd,)) == [expected] * workers


def swapped_rows(world: lockstep.World) -> object:
    stepper = stepper_of(world)
    step_of(stepper, world, 0)
    if world.rank == 1:
        with torch.no_grad():
            weight(stepper).copy_(weight(stepper).flip(0))
    return found(stepper)


def test_two_rows_that_have_changed_places_are_found() -> None:
    assert run_ranks(swapped_rows, 2) == [("2.weight", (1,))] * 2


def after_a_resume(world: lockstep.World, at: int, flipped_after: int) -> tuple[int, str]:
    """A process that begins at step `at`: the steps until a flip is found."""
    stepper = stepper_of(world)
    stepper.steps = at
    for number in range(at, at + 260):
        if number == flipped_after and world.rank == 1:
            flip(weight(stepper))
        try:
            step_of(stepper, world, number)
        except ReplicaDivergence as error:
            return stepper.steps, error.parameter
    return -1, ""


@pytest.mark.parametrize(
    ("at", "flipped_after", "step"),
    [(0, 1, 2), (0, 2, 102), (0, 150, 202), (150, 151, 152), (150, 153, 252)],
)
def test_steps_are_counted_over_the_processes_of_a_run(
    at: int, flipped_after: int, step: int
) -> None:
    """After the first two of each, and 100 after the last comparison at the latest."""
    assert run_ranks(after_a_resume, 2, (at, flipped_after)) == [(step, "2.weight")] * 2


def overwritten(world: lockstep.World, owner: int) -> tuple[int, str, tuple[int, ...]]:
    stepper = stepper_of(world, "sharded")
    for number in range(30):
        if number == 7 and world.rank == 1:
            for parameter in stepper.model.parameters():
                flip(parameter, 0 if owner == 0 else parameter.numel() - 1, bit=22)
        try:
            step_of(stepper, world, number)
        except ReplicaDivergence as error:
            return stepper.steps, error.parameter, error.ranks
    return stepper.steps, "", ()


@pytest.mark.parametrize("owner", [0, 1])
def test_a_weight_of_a_sharded_update_is_compared_before_the_next_all_gather_overwrites_it(
    owner: int,
) -> None:
    """Whichever rank updates it: with another's it lasts for a step, with its own it would be
    everybody's.
    """
    assert run_ranks(overwritten, 2, (owner,)) == [(7, "0.weight", (1,))] * 2


def alone(world: lockstep.World) -> object:
    stepper = stepper_of(world)
    step_of(stepper, world, 0)
    flip(weight(stepper))
    return found(stepper)


def test_one_rank_has_nothing_to_compare_with() -> None:
    assert run_ranks(alone, 1) == [None]


def unchecked(world: lockstep.World) -> object:
    model = model_of()
    stepper = lockstep.Stepper(
        model, torch.optim.SGD(model.parameters(), lr=0.1), checks="start", world=world
    )
    step_of(stepper, world, 0)
    if world.rank == 1:
        flip(weight(stepper))
    return found(stepper)


def test_checks_that_are_off_compare_nothing() -> None:
    assert run_ranks(unchecked, 2) == [None, None]


def rounded_away(world: lockstep.World) -> tuple[int, str, tuple[int, ...]]:
    stepper = stepper_of(world)
    for number in range(30):
        if number == 7 and world.rank == 1:
            flip(statistics(stepper), element=2)
        try:
            step_of(stepper, world, number)
        except ReplicaDivergence as error:
            return stepper.steps, error.parameter, error.ranks
    return stepper.steps, "", ()


def test_a_low_bit_of_a_moving_buffer_is_compared_in_the_step_that_would_round_it_away() -> None:
    assert run_ranks(rounded_away, 2) == [(7, "1.running_var", (1,))] * 2
