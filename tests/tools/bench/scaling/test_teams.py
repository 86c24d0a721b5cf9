"""Teams are worlds of their own, and never compute at the same time."""

from __future__ import annotations

import time
from datetime import timedelta
from itertools import pairwise

import pytest
import torch

from lockstep.errors import WorkerFailed
from lockstep.tools.bench.scaling.timing import TeamTurns, run_teams, seat
from lockstep.world.world import init

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
    with init(backend="gloo", timeout=timedelta(seconds=30)) as world:
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
    with init(backend="gloo") as world:
        turns.ready()
        if world.size == 2 and world.rank == 1:
            raise ValueError("planted")
        turns.wait_for(1)


def test_who_fails_is_named_by_its_team() -> None:
    with pytest.raises(WorkerFailed, match=r"rank 1 of 2 \(pid .*ValueError: planted") as caught:
        run_teams(failing, (1, 2), ())
    assert caught.value.rank == 1
