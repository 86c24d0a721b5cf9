"""Replicas that differ are found where it counts, whatever differs in them: tensor, rank and
step are named on all ranks. Tensors are compared as numbers, which are equal for equal bits only.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lockstep
from lockstep.checks.divergence import chunks, digest, mixed, octets_of
from lockstep.errors import ReplicaDivergence
from tests.teams import on_team

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


def moments(stepper: lockstep.Stepper) -> dict[str, Tensor]:
    state: dict[str, Tensor] = stepper.optimizer.state[stepper.model[0].bias]
    return state


REPLICATED: dict[str, Callable[[lockstep.Stepper], Tensor]] = {
    "2.weight": lambda stepper: stepper.model[2].weight,
    "1.running_var": lambda stepper: stepper.model[1].running_var,
    "exp_avg/0.bias": lambda stepper: moments(stepper)["exp_avg"],
    "exp_avg_sq/0.bias": lambda stepper: moments(stepper)["exp_avg_sq"],
    "step/0.bias": lambda stepper: moments(stepper)["step"],
}


def finding(stepper: lockstep.Stepper) -> tuple[str, tuple[int, ...]] | None:
    try:
        stepper.check_replicas()
    except ReplicaDivergence as error:
        return error.parameter, error.ranks
    return None


def one_bit_each(world: lockstep.World, odd: int) -> list[object]:
    stepper = stepper_of(world)
    findings: list[object] = []
    for number in range(3):
        step_of(stepper, world, number)
    for where in REPLICATED.values():
        findings.append(finding(stepper))
        tensor = where(stepper)
        if world.rank == odd:
            flip(tensor)
        findings.append(finding(stepper))
        if world.rank == odd:
            flip(tensor)
    return findings


@pytest.mark.parametrize(("workers", "odd", "ranks"), [(2, 1, (1,)), (3, 0, (0,)), (3, 2, (2,))])
def test_one_low_bit_of_anything_replicated_is_found_and_named(
    workers: int, odd: int, ranks: tuple[int, ...]
) -> None:
    """With three ranks the one that differs from the two others is named, also where it is rank
    0.
    """
    expected: list[object] = []
    for name in REPLICATED:
        expected += [None, (name, ranks)]
    assert on_team(one_bit_each, workers, (odd,)) == [expected] * workers


def weight_of(stepper: lockstep.Stepper) -> None:
    flip(stepper.model[2].weight)


def statistics_of(stepper: lockstep.Stepper) -> None:
    flip(stepper.model[1].running_var, element=2)


def slices(element: int, stepper: lockstep.Stepper) -> None:
    """Rank 0 updates the first element of each parameter, rank 1 the last one."""
    for parameter in stepper.model.parameters():
        flip(parameter, element, bit=22)


def steps_until_found(
    world: lockstep.World,
    hurt: Callable[[lockstep.Stepper], None],
    before: int,
    at: int = 0,
    update: str = "replicated",
) -> tuple[int, str, tuple[int, ...]]:
    """Rank 1 is hurt before a step, in a process that begins at step `at`."""
    stepper = stepper_of(world, update)
    stepper.steps = at
    for number in range(at, at + 260):
        if number == before and world.rank == 1:
            hurt(stepper)
        try:
            step_of(stepper, world, number)
        except ReplicaDivergence as error:
            return stepper.steps, error.parameter, error.ranks
    return -1, "", ()


@pytest.mark.parametrize(
    ("at", "before", "step"),
    [(0, 1, 2), (0, 2, 102), (0, 150, 202), (150, 151, 152), (150, 153, 252)],
)
def test_steps_are_counted_over_the_processes_of_a_run(at: int, before: int, step: int) -> None:
    """After the first two of each, and 100 after the last comparison at the latest."""
    results = on_team(steps_until_found, 2, (weight_of, before, at))
    assert results == [(step, "2.weight", (1,))] * 2


@pytest.mark.parametrize(
    ("hurt", "update", "name"),
    [
        (statistics_of, "replicated", "1.running_var"),
        (partial(slices, 0), "sharded", "0.weight"),
        (partial(slices, -1), "sharded", "0.weight"),
    ],
)
def test_what_is_overwritten_is_compared_before(
    hurt: Callable[[lockstep.Stepper], None], update: str, name: str
) -> None:
    """The step would round a low bit of a moving buffer away. A weight of a sharded update is
    overwritten by the all-gather, whichever rank updates it: with another's it lasts for a step,
    with its own it would be everybody's.
    """
    results = on_team(steps_until_found, 2, (hurt, 7, 0, update))
    assert results == [(7, name, (1,))] * 2


def uncompared(world: lockstep.World) -> object:
    """One rank has nothing to compare with; or the checks are off."""
    model = model_of()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    checks: Any = "start" if world.size > 1 else "full"
    stepper = lockstep.Stepper(model, sgd, checks=checks, world=world)
    step_of(stepper, world, 0)
    if world.rank == world.size - 1:
        flip(stepper.model[2].weight)
    return finding(stepper)


def test_one_rank_and_checks_that_are_off_compare_nothing() -> None:
    for workers in (1, 2):
        assert on_team(uncompared, workers) == [None] * workers


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


def test_the_order_of_elements_and_of_tensors_counts_and_the_number_is_signed() -> None:
    first, second = torch.randn(4, 6), torch.randn(3)
    assert digest([first[[1, 0, 2, 3]]]) != digest([first])
    assert digest([first, second]) != digest([second, first])
    assert digest([]) == digest([torch.zeros(0, 3)])
    assert all(-(2**63) <= digest([torch.tensor(number)]) < 2**63 for number in range(50))


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
    words = list(chunks(octets, 64))
    assert max(chunk.numel() for chunk in words) <= 64 / 8
    mixed_together = torch.cat(words).view(torch.uint8).tolist()
    assert list(filter(None, mixed_together)) == list(filter(None, whole))
