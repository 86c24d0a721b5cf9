"""Grader 10: the rules of a pipeline, one by one; split layers against the whole ones."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from grading import check, close, on_ranks, replaced
from torch import Tensor

import lockstep

WIDTH, HIDDEN, OUTPUTS, WORKERS = 5, 12, 3, 3


def grade(lesson: ModuleType) -> None:
    for stages, micro_batches in [(1, 1), (1, 4), (4, 1), (4, 4), (3, 8)]:
        check_clock(lesson, stages, micro_batches)
    inputs, first, second = matrices()
    expected = torch.relu(inputs @ first) @ second
    for rank, (found, sent) in enumerate(on_ranks(on_a_rank, WORKERS, lesson.split_mlp)):
        check(
            isinstance(found, Tensor) and found.shape == expected.shape,
            f"On rank {rank} split_mlp did not return a tensor of shape {tuple(expected.shape)}.",
        )
        check(
            close(found, expected),
            f"On rank {rank} the result is not that of the whole matrices. Each rank has a partial "
            "sum of it.",
        )
        check(
            sent <= expected.numel(),
            f"Rank {rank} gave {sent} numbers to collectives. {expected.numel()} are enough.",
        )


def check_clock(lesson: ModuleType, stages: int, micro_batches: int) -> None:
    case = f"clock({stages}, {micro_batches})"
    ticks = lesson.clock(stages, micro_batches)
    finished: dict[tuple[int, int], int] = {}
    for tick, running in enumerate(ticks):
        working = [stage for stage, _ in running]
        check(
            working == sorted(set(working)),
            f"{case}: at tick {tick} the stages are {working}. Each runs once, in order.",
        )
        for stage, micro_batch in running:
            place = f"{case}: at tick {tick} stage {stage} computes micro-batch {micro_batch}"
            check((stage, micro_batch) not in finished, f"{place}, a second time.")
            for needed in ((stage - 1, micro_batch), (stage, micro_batch - 1)):
                check(
                    min(needed) < 0 or finished.get(needed, tick) < tick,
                    f"{place}. Stage {needed[0]} has not finished micro-batch {needed[1]}.",
                )
        finished |= dict.fromkeys(running, tick)
    every = {(stage, number) for stage in range(stages) for number in range(micro_batches)}
    check(
        finished.keys() == every,
        f"{case}: {len(every - finished.keys())} pairs of stage and micro-batch never run, and "
        f"{len(finished.keys() - every)} do not exist.",
    )
    check(
        len(ticks) == micro_batches + stages - 1,
        f"{case} has {len(ticks)} ticks, and {micro_batches + stages - 1} are enough.",
    )


def matrices() -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(0)
    shapes = ((4, WIDTH), (WIDTH, HIDDEN), (HIDDEN, OUTPUTS))
    inputs, first, second = (torch.randn(shape, generator=random) for shape in shapes)
    return inputs, first, second


def on_a_rank(world: lockstep.World, solve: Any) -> tuple[Any, int]:
    """The result, and how many numbers went into collectives."""
    inputs, first, second = matrices()
    share = HIDDEN // WORKERS
    mine = slice(world.rank * share, (world.rank + 1) * share)
    names, sent = ("all_reduce", "all_gather", "all_gather_into_tensor", "reduce", "broadcast"), 0

    def counted(original: Any) -> Any:
        def call(*arguments: Any, **keywords: Any) -> Any:
            nonlocal sent
            tensors = [each for each in arguments if isinstance(each, Tensor)]
            tensors += [each for each in keywords.values() if isinstance(each, Tensor)]
            sent += sum(each.numel() for each in tensors)
            return original(*arguments, **keywords)

        return call

    with replaced(names, counted):
        return solve(inputs, first[:, mine].contiguous(), second[mine].contiguous()), sent
