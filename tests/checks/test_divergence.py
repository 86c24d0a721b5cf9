"""Replicas that differ are found where it counts, whatever differs in them: tensor, rank and
step are named on all ranks. Tensors are compared as numbers, which are equal for equal bits only.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import lockstep
from lockstep.checks.divergence import chunks, digest, mixed, octets_of
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


torch.manual_seed(0)
TENSORS = {
    "float32": torch.randn(33, 7),
    "0-d": torch.tensor(2.5),
    "turned": torch.randn(5, 7).t(),
    "in the middle of another": torch.randn(9)[1:4],
    "bfloat16, odd": torch.randn(3).bfloat16(),
    "float8": torch.randn(5).to(torch.float8_e4m3fn),
    "bool": torch.tensor([True, False, True]),
    "complex": torch.randn(3, dtype=torch.complex64),
    "conjugated": torch.randn(3, dtype=torch.complex128).conj(),
    "float64": torch.randn(4, dtype=torch.float64),
    "int8": torch.arange(13, dtype=torch.int8),
    "expanded": torch.randn(3).expand(2, 3),
    "sparse": torch.eye(3).to_sparse(),
}


def flipped(tensor: Tensor, bit: int) -> Tensor:
    """A copy of its bytes in which one bit is another."""
    octets = octets_of(tensor).clone()
    octets[bit // 8] ^= 1 << bit % 8
    return octets


@pytest.mark.parametrize("tensor", TENSORS.values(), ids=TENSORS)
def test_every_bit_counts(tensor: Tensor) -> None:
    whole = digest([tensor])
    assert whole == digest([tensor.clone()]) == digest([octets_of(tensor)])
    assert all(
        digest([flipped(tensor, bit)]) != whole for bit in range(8 * octets_of(tensor).numel())
    )


def test_the_order_of_elements_and_of_tensors_counts() -> None:
    tensor = torch.randn(4, 6)
    assert digest([tensor[[1, 0, 2, 3]]]) != digest([tensor])
    first, second = torch.randn(3), torch.randn(3)
    assert digest([first, second]) != digest([second, first])


def test_the_number_is_signed_and_nothing_has_one() -> None:
    assert all(-(2**63) <= digest([torch.tensor(each)]) < 2**63 for each in range(50))
    assert digest([]) == digest([torch.zeros(0, 3)])


def test_what_a_device_computes_sees_every_bit_and_the_order() -> None:
    words = torch.randint(-(2**62), 2**62, (257,))
    whole = int(mixed(words))
    assert all(
        int(mixed(octets.view(torch.int64))) != whole
        for octets in (flipped(words, bit) for bit in range(0, 257 * 64, 7))
    )
    for first, second in ((0, 1), (3, 131), (5, 256)):
        order = torch.arange(257)
        order[[first, second]] = order[[second, first]]
        assert int(mixed(words[order])) != whole
    assert int(mixed(torch.zeros(3, dtype=torch.int64))) != int(
        mixed(torch.zeros(4, dtype=torch.int64))
    )


def test_a_device_mixes_small_tensors_together_and_large_ones_in_pieces() -> None:
    octets = [torch.randint(0, 256, (count,), dtype=torch.uint8) for count in (5, 64, 200, 1, 8)]
    whole = torch.cat(octets).tolist()
    found = list(chunks(octets, 64))
    assert max(words.numel() for words in found) <= 64 / 8
    assert [each for each in torch.cat(found).view(torch.uint8).tolist() if each] == [
        each for each in whole if each
    ]
