"""Grader 4: what a sampler promises, for many sizes."""

from __future__ import annotations

from collections import Counter
from types import ModuleType

from grading import check

SIZES = [(10, 4), (12, 4), (1797, 3), (7, 7), (3, 4), (1, 4), (2, 8), (5, 1)]


def grade(lesson: ModuleType) -> None:
    for samples, size in SIZES:
        for drop_last in (False, True):
            check_shares(lesson, samples, size, drop_last)
    check_orders(lesson)


def shares(
    lesson: ModuleType, samples: int, size: int, seed: int, epoch: int, drop_last: bool = False
) -> list[list[int]]:
    return [
        lesson.rank_indices(samples, rank, size, seed=seed, epoch=epoch, drop_last=drop_last)
        for rank in range(size)
    ]


def check_shares(lesson: ModuleType, samples: int, size: int, drop_last: bool) -> None:
    case = f"{samples} samples, {size} ranks, drop_last={drop_last}"
    found = shares(lesson, samples, size, seed=3, epoch=2, drop_last=drop_last)
    counts = [len(each) for each in found]
    expected = samples // size if drop_last else -(-samples // size)
    check(
        counts == [expected] * size,
        f"{case}: the ranks got {counts} indices. Each must get {expected}.",
    )
    times = Counter(index for each in found for index in each)
    strange = sorted(set(times) - set(range(samples)))
    check(not strange, f"{case}: {strange} are not indices of a sample.")
    if drop_last:
        twice = sorted(index for index, count in times.items() if count > 1)
        check(not twice, f"{case}: samples {twice} were given out more than once.")
        return
    missing = sorted(set(range(samples)) - set(times))
    check(not missing, f"{case}: nobody got samples {missing[:5]}.")
    most, least = max(times.values()), min(times.values())
    check(
        most - least <= 1,
        f"{case}: one sample was given out {most} times, another {least} times. Pad with each sample "
        "at most once more.",
    )


def check_orders(lesson: ModuleType) -> None:
    whole = {
        (seed, epoch): shares(lesson, 50, 1, seed, epoch)[0] for seed in (0, 1) for epoch in (0, 1)
    }
    check(shares(lesson, 50, 1, 0, 0)[0] == whole[0, 0], "The same call gave another order.")
    check(whole[0, 0] != whole[0, 1], "Epochs 0 and 1 have the same order.")
    check(whole[0, 0] != whole[1, 0], "Seeds 0 and 1 have the same order.")
    check(
        whole[0, 1] != whole[1, 0],
        "Seed 0 in epoch 1 has the same order as seed 1 in epoch 0. Do not add the two numbers.",
    )
