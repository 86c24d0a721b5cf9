"""Compressed sums: the same bits on all ranks, nothing lost for good, as few bytes as promised."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

import lockstep
from lockstep.gradients.compression.power_sgd import PowerSGD
from tests.gradients.compression.summing import (
    EVERY,
    OWING,
    Summing,
    gradients_of,
    parameters,
    true_sum,
)
from tests.step.walking import same
from tests.teams import on_team

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
STEPS = 5

Added = tuple[list[list[Tensor]], list[Tensor]]
"""Every step's sums, and what a rank owes in the end."""


def added_up(world: lockstep.World, text: str) -> list[Added]:
    """By dtype. The buckets are laid anew on the way."""
    results = []
    for dtype in DTYPES:
        summing = Summing(world.group, text, parameters(dtype))
        assert len(summing.buckets) > 2
        sums = []
        for step in range(STEPS):
            if step == STEPS // 2:
                summing.lay(list(reversed(range(len(summing.given)))))
            sums.append(summing(gradients_of(world.rank, step, summing.given)))
        results.append((sums, summing.owed()))
    return results


def norm(tensors: list[Tensor]) -> float:
    return math.sqrt(sum(each.double().square().sum().item() for each in tensors))


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("text", EVERY)
def test_all_ranks_have_the_same_bits_and_nothing_is_lost(text: str, workers: int) -> None:
    by_dtype = zip(*on_team(added_up, workers, (text,)), strict=True)
    for dtype, ranks in zip(DTYPES, by_dtype, strict=True):
        for sums, _ in ranks[1:]:
            assert same(sums, ranks[0][0])
        if text in OWING:
            assert all(norm(owed) > 1e-3 for _, owed in ranks)
        for number in range(len(parameters(dtype))):
            assert lost(number, dtype, ranks) <= rounding(text, dtype), (dtype, number)


def rounding(text: str, dtype: torch.dtype) -> float:
    """What may be lost: what the gradients' own dtype rounds, and of a cast what it does."""
    own = {
        torch.float64: 1e-13 if text in OWING[1:] else 1e-6,
        torch.float32: 1e-5,
        torch.float16: 1e-2,
        torch.bfloat16: 4e-2,
    }
    return own[dtype] + {"bf16": 1e-2, "fp16": 1e-3}.get(text, 0.0)


def lost(number: int, dtype: torch.dtype, ranks: Sequence[Added]) -> float:
    """The part of a parameter's gradients that was neither applied nor is owed."""
    true = [true_sum(len(ranks), step, parameters(dtype))[number] for step in range(STEPS)]
    rest = torch.stack(true).sum(0)
    for sums in ranks[0][0]:
        rest = rest - sums[number].double()
    for _, owed in ranks:
        rest = rest - owed[number].double()
    return norm([rest]) / max(norm(true), 1e-30)


def one_sum(world: lockstep.World, text: str) -> list[Tensor]:
    summing = Summing(world.group, text, parameters())
    return summing(gradients_of(world.rank, 0, summing.given))


@pytest.mark.parametrize(("text", "worst"), [("bf16", 2**-8), ("fp16", 2**-11), ("int8", 1 / 127)])
def test_one_sum_is_near_the_true_one(text: str, worst: float) -> None:
    """Two roundings, each relative to the largest element of its own parameter."""
    found = on_team(one_sum, 3, (text,))[0]
    for ours, true in zip(found, true_sum(3, 0, parameters()), strict=True):
        if ours.numel() > 1:
            assert norm([ours.double() - true]) <= 2 * worst * norm([true])


def of_ones(world: lockstep.World, text: str) -> float:
    summing = Summing(world.group, text, [nn.Parameter(torch.zeros(10))])
    return summing([torch.full((10,), 1 + 2.0**-7 * (world.rank == 0))])[0][0].item()


def test_a_sum_of_bf16_is_added_in_float32() -> None:
    """1 + 2^-7 is a bfloat16 number; a sum in bfloat16 would round in every addition."""
    # 3.0078125 has 9 bits: rounded to even
    assert on_team(of_ones, 3, ("bf16",)) == [3.0] * 3
    exact = on_team(of_ones, 3, ("fp16",))
    assert exact == [3.0078125] * 3


def of_size(world: lockstep.World, text: str, size: float) -> list[Tensor]:
    summing = Summing(world.group, text, [nn.Parameter(torch.zeros(1000))])
    return summing([torch.linspace(-1, 1, 1000) * size])


@pytest.mark.parametrize("text", ["fp16", "int8"])
def test_neither_large_nor_small_gradients_leave_the_range(text: str) -> None:
    """fp16 ends at 65504 and begins at 6e-8; a sum of losses over a large batch is far beyond."""
    for size in (1e-30, 1e-6, 1e6, 1e30):
        for (total,) in on_team(of_size, 2, (text, size)):
            expected = 2 * size * torch.linspace(-1, 1, 1000)
            assert (total - expected).abs().max() <= 2 * size / 50


def sent(world: lockstep.World, text: str | None) -> int:
    given = [nn.Parameter(torch.zeros(512, 512)), nn.Parameter(torch.zeros(512, 512))]
    before = world.group.bytes_sent
    if text is not None:
        Summing(world.group, text, given)(gradients_of(world.rank, 0, given))
    else:
        for parameter in given:
            world.group.all_reduce(parameter.detach()).wait()
    return world.group.bytes_sent - before


@pytest.mark.parametrize("workers", [2, 3])
def test_bytes(workers: int) -> None:
    uncompressed = on_team(sent, workers, (None,))[0]
    for text, times_less in {"bf16": 2, "int8": 3.7, "powersgd:4": 60}.items():
        assert on_team(sent, workers, (text,))[0] * times_less <= 1.001 * uncompressed, text


def with_a_nan(world: lockstep.World, text: str) -> tuple[bool, list[bool], list[Tensor]]:
    """Three steps; in the second, one rank has a nan in one parameter."""
    summing = Summing(world.group, text, parameters())
    summing(gradients_of(world.rank, 0, summing.given))
    before = summing.owed()
    bad = gradients_of(world.rank, 1, summing.given)
    bad[0][3, 4] = torch.nan if world.rank == 1 else 1.0
    spoilt = summing(bad)
    untouched = torch.equal(summing.owed()[0], before[0])
    after = summing(gradients_of(world.rank, 2, summing.given))
    return untouched, [bool(each.isfinite().all()) for each in spoilt], [*after, *summing.owed()]


@pytest.mark.parametrize("text", EVERY)
def test_a_nan_is_seen_by_all_ranks_and_forgotten(text: str) -> None:
    for untouched, finite, after in on_team(with_a_nan, 2, (text,)):
        assert untouched
        assert not finite[0]
        assert all(each.isfinite().all() for each in after)


def of_an_idle_rank(world: lockstep.World, text: str) -> tuple[float, float]:
    """With zeros from everyone, debts become small."""
    summing = Summing(world.group, text, parameters())
    summing(gradients_of(world.rank, 0, summing.given))
    before = norm(summing.owed())
    for _ in range(40):
        summing([torch.zeros_like(each) for each in summing.given])
    return before, norm(summing.owed())


@pytest.mark.parametrize("text", OWING)
def test_debts_are_paid_also_by_ranks_that_have_nothing_new(text: str) -> None:
    for before, after in on_team(of_an_idle_rank, 3, (text,)):
        assert before > 0
        assert after < 0.2 * before


def followed(world: lockstep.World, warm: bool) -> list[float]:
    """How much of a gradient of rank 2 that does not change is missing from each step's sum."""
    fixed = torch.Generator().manual_seed(5)
    left, values, right = (
        torch.randn(shape, generator=fixed) for shape in ((60, 4), (4,), (4, 50))
    )
    matrix = left @ torch.diag(values.abs() + torch.tensor([3.0, 2.0, 0.2, 0.1])) @ right
    summing = Summing(world.group, "powersgd:2", [nn.Parameter(torch.zeros(60, 50))])
    missing = []
    for _ in range(8):
        if not warm:
            summing.reduction._compressor = PowerSGD(world.group, 2)
        # nothing is owed: only the warm start is looked at
        summing.reduction.take_back(summing.reduction.kept()[0], [])
        (found,) = summing([matrix * (world.rank + 1)])
        missing.append(norm([found - 3 * matrix]) / norm([3 * matrix]))
    return missing


def test_power_sgd_starts_warm() -> None:
    warm, cold = on_team(followed, 2, (True,))[0], on_team(followed, 2, (False,))[0]
    assert cold[-1] == pytest.approx(cold[0])
    best = warm[-1]
    assert best < 0.9 * cold[0]
    # it comes nearer from step to step
    assert warm == pytest.approx(sorted(warm, reverse=True), rel=1e-3)


def of_zeros(world: lockstep.World) -> float:
    """A layer that gets no gradient for some steps, and then one."""
    summing = Summing(world.group, "powersgd:2", [nn.Parameter(torch.zeros(60, 50))])
    for _ in range(2):
        assert not summing([torch.zeros(60, 50)])[0].any()
    matrix = torch.zeros(60, 50)
    matrix[7, 9] = 2.0
    for _ in range(3):
        (found,) = summing([matrix])
    return found[7, 9].item()


def test_power_sgd_outlives_gradients_of_zero() -> None:
    assert on_team(of_zeros, 2) == pytest.approx([4.0] * 2, rel=1e-4)


def in_autocast(world: lockstep.World) -> None:
    gradients = gradients_of(world.rank, 0, parameters())
    plain = Summing(world.group, "powersgd:2", parameters())(gradients)
    with torch.autocast("cpu", torch.bfloat16):
        assert same(Summing(world.group, "powersgd:2", parameters())(gradients), plain)


def test_the_users_autocast_does_not_round_factors() -> None:
    on_team(in_autocast, 2)
