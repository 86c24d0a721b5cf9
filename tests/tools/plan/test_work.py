"""What a rank of W has to do, from what one rank, or two side by side, were measured to do."""

from __future__ import annotations

import pytest

from lockstep.tools.plan.work import PlanScaling, work_of
from tests.tools.plan.profiles import profile

STRONG = PlanScaling(base=1)
WEAK = PlanScaling(base=2, weak=True)
HERE = PlanScaling(base=1, per_host=64)


def micro_batches(scaling: PlanScaling, *workers: int) -> list[int]:
    return [work_of(profile(), scaling, count).micro_batches for count in workers]


def test_strong_scaling_deals_out_the_micro_batches_and_weak_keeps_those_of_the_base() -> None:
    assert micro_batches(STRONG, 1, 2, 3, 8, 64) == [8, 4, 3, 1, 1]
    assert work_of(profile(), STRONG, 64).samples == 64
    assert micro_batches(WEAK, 2, 4, 64) == [4, 4, 4]
    assert work_of(profile(), WEAK, 64).samples == 32 * 64


def test_ranks_of_one_host_compute_as_those_side_by_side_and_others_as_one_alone() -> None:
    assert {work_of(profile(), STRONG, workers).forward for workers in (1, 2, 512)} == {1.0}
    # of 64 ranks, those without a micro-batch leave the cores to others
    here = [work_of(profile(), HERE, workers).backward for workers in (1, 2, 4, 8, 64)]
    assert here == [2.0, 3.0, 6.0, 12.0, 12.0]
    four = work_of(profile(), HERE, 4)
    assert (four.forward, four.optimizer, four.other, four.loading) == (3.0, 1.0, 0.5, 0.5)


def test_gpus_are_not_shared() -> None:
    assert work_of(profile(device="cuda"), HERE, 8).backward == 2.0


@pytest.mark.parametrize(
    ("scaling", "counts", "expected"),
    [
        (STRONG, [1, 2, 512], [1]),
        (HERE, [1, 2, 4], [1, 2]),
        (PlanScaling(base=4, per_host=64), [4, 8], [2]),
        (PlanScaling(base=1, per_host=8), [1, 64], [1, 2]),
    ],
)
def test_what_must_be_profiled(
    scaling: PlanScaling, counts: list[int], expected: list[int]
) -> None:
    assert scaling.sides(counts, 8, 2) == expected
