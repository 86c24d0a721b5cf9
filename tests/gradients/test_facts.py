"""What ranks tell each other in a step, each something else."""

from __future__ import annotations

import torch

from lockstep.gradients.facts import Facts, FactsMessage
from lockstep.world.world import World
from tests.teams import on_team


def told(world: World, slots: int) -> Facts:
    message = FactsMessage(world.group, world.device, slots)
    rank = world.rank
    message.add(2.0 + rank, torch.tensor(10.0 * (rank + 1)), slot=rank)
    message.add_samples(5 + rank)
    message.add_times(busy=0.25 * (rank + 1), waited=0.5 * rank)
    message.add_digest([0, 2**51 + 1, 2**52][rank], seconds=0.5 * rank)
    message.send(stop=rank == 1, newly_moving=False)
    return message.wait()


def test_what_each_rank_says_stands_at_its_own_place() -> None:
    for slots in (0, 4):
        for found in on_team(told, 3, (slots,)):
            assert found == Facts(
                weight=9.0,
                loss=60.0,
                stop=1.0,
                newly_moving=0.0,
                samples_by_rank=(5, 6, 7),
                losses_by_rank=(10.0, 20.0, 30.0),
                busy_by_rank=(0.25, 0.5, 0.75),
                waited_by_rank=(0.0, 0.5, 1.0),
                digests_by_rank=(0.0, 2.0**51 + 1, 2.0**52),
                digesting_by_rank=(0.0, 0.5, 1.0),
            )
