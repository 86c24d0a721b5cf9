"""Tensors of torch.inference_mode in every collective: in the mode, outside, and across."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import lockstep
from lockstep import collectives
from tests.teams import on_team


def every_collective(world: lockstep.World, algorithm: Any) -> list[Any]:
    results: list[Any] = []
    rank, size = world.rank, world.size
    moving: Any = "auto" if algorithm == "ring" else algorithm
    with torch.inference_mode():
        local = torch.tensor([[1.0, 2.0], [3.0, 4.0]]).t() + rank
        ordinary = torch.ones(2) * rank
        total, mean = local.clone(), local.clone()
        assert collectives.all_reduce(total, algorithm=algorithm) is total
        begun = collectives.all_reduce(mean, "mean", algorithm=algorithm, async_op=True)
    assert begun.wait() is mean
    results += [total.clone(), mean]
    for inside in (True, False):
        with torch.inference_mode(inside):
            sent = local.clone() if inside else total
            results.append(collectives.broadcast(sent, 1, algorithm=moving))
            results.append(collectives.reduce_scatter(local, algorithm=algorithm))
            results.append(collectives.all_gather(local, algorithm=algorithm))
            if algorithm != "shared_memory":
                collectives.reduce(total, 0)
                collectives.gather(local)
                collectives.scatter(tensors=[local] * size if rank == 0 else None)
                collectives.all_to_all([local] * size)
    with torch.inference_mode():
        results.append(collectives.all_reduce(ordinary, algorithm=algorithm))
    return [result.tolist() for result in results]


@pytest.mark.parametrize("algorithm", ["native", "ring", "shared_memory"])
def test_results_are_those_of_ordinary_tensors(algorithm: str) -> None:
    both = torch.tensor([[1.0, 3.0], [2.0, 4.0]])
    for rank, results in enumerate(on_team(every_collective, 2, args=(algorithm,))):
        assert results[:3] == [(2 * both + 1).tolist(), (both + 0.5).tolist(), (both + 1).tolist()]
        assert results[3] == (2 * both + 1)[rank : rank + 1].tolist()
        assert results[4] == torch.cat([both, both + 1]).tolist()
        assert results[-1] == [1.0, 1.0]
