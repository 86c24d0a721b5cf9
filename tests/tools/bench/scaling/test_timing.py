"""What a rank times: the right samples, with the right threads, loaded or held.

Teams are worlds of their own, and never compute at the same time.
"""

from __future__ import annotations

import time
from dataclasses import replace
from datetime import timedelta
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep.config.settings import Settings
from lockstep.errors import WorkerFailed
from lockstep.testing import run_ranks
from lockstep.tools.bench.scaling.prediction import carried, in_memory, link_of
from lockstep.tools.bench.scaling.timing import TeamTurns, run_teams, seat, timed
from lockstep.tools.timing.in_turns import Trial
from lockstep.world.world import World, init
from tests.training import toy

SETTINGS = Settings(task="toy", device="cpu")


class Counting(torch.utils.data.Dataset[Any]):
    """Counts what is fetched."""

    def __init__(self) -> None:
        self.inner, self.fetched = toy.data(40, 1), 0

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, number: int) -> Any:
        self.fetched += 1
        return self.inner[number]


def on_rank(world: World, batch: int, loading: bool, steps: int) -> tuple[int, int, set[int], int]:
    """(samples, seconds are positive, threads seen, samples fetched while it was timed)."""
    threads, data = set(), Counting()

    def loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
        threads.add(torch.get_num_threads())
        return toy.loss(output, batch)

    task = toy.task(global_batch=16, micro_batch=4, loss=loss, train_data=data)
    trial = Trial(task, replace(SETTINGS, workers=world.size), world)
    work = trial.beside(batch, 2, held=0 if loading else 4)
    before = data.fetched
    samples, seconds = timed(work, steps, world)
    work.close()
    assert seconds > 0
    return samples, world.size, threads, data.fetched - before


@pytest.mark.parametrize("batch", [16, 8, 4])
def test_a_works_own_batch_is_what_is_timed_and_loaded(batch: int) -> None:
    """The model is of a task with another one. Of 40 samples an epoch, the short last step is
    left out.
    """
    ((samples, _, threads, fetched),) = run_ranks(on_rank, 1, (batch, True, 5))
    assert samples == 5 * batch
    assert threads == {2}
    assert fetched == 6 * batch  # one more, which is not timed


def test_held_batches_are_not_loaded_again() -> None:
    ((samples, _, _, fetched),) = run_ranks(on_rank, 1, (16, False, 5))
    assert (samples, fetched) == (5 * 16, 0)


def both_on_two(world: World) -> tuple[Any, Any, list[bool]]:
    shared, exact, native = (
        Trial(toy.task(), replace(SETTINGS, **options), world).training.stepper.reducer.reduction
        for options in (
            {"reduce": "shared_memory"},
            {"reduce": "shared_memory", "exact": True},
            {"reduce": "native"},
        )
    )
    return (
        on_rank(world, 16, True, 3),
        link_of(world, shared),
        [in_memory(each) for each in (shared, exact, native)],
    )


def test_two_ranks_count_the_samples_of_both_and_agree_on_their_link() -> None:
    (first, link, memory), (second, same, _) = run_ranks(both_on_two, 2)
    assert memory == [True, True, False]
    assert first[0] == second[0] == 3 * 16
    assert link == same
    assert link.bandwidth > 0


def buckets(world: World) -> Any:
    # a bucket for each gradient
    trial = Trial(toy.task(), replace(SETTINGS, bucket_mb=1e-5), world)
    return carried(trial.training, None).buckets


def test_buckets_leave_as_the_backward_comes_through_their_elements() -> None:
    """A linear layer of 96 weights, BatchNorm's 16 and 16, and a last layer of 48 and 3, which
    comes first.
    """
    (found,) = run_ranks(buckets, 1)
    assert [shape for each in found for shape in each.tensors] == [
        (3,),
        (3, 16),
        (16,),
        (16,),
        (16, 6),
    ]
    assert [each.elements for each in found] == [3, 48, 16, 16, 96]
    assert [each.ready for each in found] == [
        pytest.approx(so_far / 179) for so_far in (3, 51, 67, 83, 179)
    ]


ORDER = [1, 0, 0, 1, 0]  # of teams


def test_ranks_are_seated_team_by_team() -> None:
    assert [seat((1, 2, 4), rank) for rank in range(7)] == [
        (0, 0),
        (1, 0),
        (1, 1),
        (2, 0),
        (2, 1),
        (2, 2),
        (2, 3),
    ]


def in_turns(turns: TeamTurns) -> tuple[int, float, int, list[tuple[int, float, float]]]:
    """Each turn sums over its team; its borders are of a clock that all processes share."""
    with init(backend="gloo", timeout=timedelta(seconds=30), init_method=turns.rendezvous) as world:
        turns.ready()
        spans = []
        total = torch.zeros(())
        for number, team in enumerate(ORDER):
            if team == world.size - 1:
                with turns.turn(number):
                    begin = time.monotonic()
                    total = torch.ones(())
                    world.group.all_reduce(total).wait()
                    spans.append((number, begin, time.monotonic()))
        turns.wait_for(len(ORDER))
        return world.size, total.item(), world.local_size, spans


def test_each_team_is_a_world_and_turns_follow_each_other() -> None:
    first, second = run_teams(in_turns, (1, 2), ())
    assert (first[:3], second[:3]) == ((1, 1.0, 1), (2, 2.0, 2))
    spans = sorted([*first[3], *second[3]])
    assert [number for number, _, _ in spans] == [0, 1, 2, 3, 4]
    assert [number for number, _, _ in first[3]] == [1, 2, 4]
    for (_, _, end), (_, begin, _) in pairwise(spans):
        assert end <= begin


def failing(turns: TeamTurns) -> None:
    with init(backend="gloo", init_method=turns.rendezvous) as world:
        turns.ready()
        if world.size == 2 and world.rank == 1:
            raise ValueError("planted")
        turns.wait_for(1)


def test_who_fails_is_named_by_its_team() -> None:
    with pytest.raises(WorkerFailed, match=r"rank 1 of 2 \(pid .*ValueError: planted") as caught:
        run_teams(failing, (1, 2), ())
    assert caught.value.rank == 1
