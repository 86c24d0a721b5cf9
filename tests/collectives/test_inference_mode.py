"""Tensors of torch.inference_mode in every collective: inside of the mode, outside of it, and
begun inside and ended outside.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import lockstep
from lockstep import collectives
from tests.teams import on_team


def every_collective(world: lockstep.World, algorithm: Any) -> list[list[float]]:
    found: list[list[float]] = []
    rank, size = world.rank, world.size
    moving: Any = "auto" if algorithm == "ring" else algorithm

    def note(*results: torch.Tensor) -> None:
        found.extend(tensor.flatten().tolist() for tensor in results)

    with torch.inference_mode():
        mine = torch.tensor([[1.0, 2.0], [3.0, 4.0]]).t() + rank
        ordinary = torch.ones(2) * rank
        total = mine.clone()
        assert collectives.all_reduce(total, algorithm=algorithm) is total
        begun = collectives.all_reduce(
            tensor := mine.clone(), "mean", algorithm=algorithm, async_op=True
        )
    assert begun.wait() is tensor
    note(total, tensor)
    for inside in (True, False):
        with torch.inference_mode(inside):
            note(collectives.broadcast(mine.clone() if inside else total, 1, algorithm=moving))
            note(
                collectives.reduce_scatter(mine, algorithm=algorithm),
                collectives.all_gather(mine, algorithm=algorithm),
            )
            if algorithm != "shared_memory":
                note(collectives.reduce(total, 0), *(collectives.gather(mine) or []))
                note(
                    collectives.scatter(tensors=[mine] * size if rank == 0 else None),
                    *collectives.all_to_all([mine] * size),
                )
    with torch.inference_mode():
        note(collectives.all_reduce(ordinary, algorithm=algorithm))
    return found


@pytest.mark.parametrize("algorithm", ["native", "ring", "shared_memory"])
def test_results_are_those_of_ordinary_tensors(algorithm: str) -> None:
    found = on_team(every_collective, 2, args=(algorithm,))
    both = torch.tensor([[1.0, 3.0], [2.0, 4.0]])
    for rank, mine in enumerate(found):
        assert mine[0] == (2 * both + 1).flatten().tolist()
        assert mine[1] == (both + 0.5).flatten().tolist()
        assert mine[2] == (both + 1).flatten().tolist()
        assert mine[3] == (2 * both + 1)[rank].tolist()
        assert mine[4] == torch.cat([both, both + 1]).flatten().tolist()
        assert mine[-1] == [1.0, 1.0]
