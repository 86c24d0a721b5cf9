"""One rank's part of the parameters, without processes: sums, ages, and a step for every window,
once.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lockstep.collectives.group import Group
from lockstep.gradients.layout import Entry, plan
from lockstep.updates.server.shard import Masters, ServerShard


class Alone(Group):
    """Rank `rank` of `size`, which asks nobody."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


def parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [
        nn.Parameter(torch.randn(*shape, generator=generator))
        for shape in ((40, 60), (60,), (3, 60))
    ]


def made(
    rank: int = 0, owners: int = 1, *, by_age: bool = False, momentum: float = 0.0
) -> tuple[Masters, ServerShard, torch.optim.Optimizer]:
    mine = parameters()
    entries = [
        Entry(str(number), each.numel(), each.dtype, each.device)
        for number, each in enumerate(mine)
    ]
    masters = Masters(mine, plan(entries, [0, 1, 2]), Alone(rank, owners), owners)
    optimizer = torch.optim.SGD(masters.views, lr=0.5, momentum=momentum)
    return masters, ServerShard(masters, optimizer, by_age=by_age, stepped=lambda: None), optimizer


def ones(masters: Masters, value: float) -> list[Tensor]:
    return [torch.full_like(flat, value) for flat in masters.flats if flat.numel()]


def elements(shard: ServerShard) -> Tensor:
    return torch.cat(shard.pull()[2])


def test_a_window_is_its_sum_over_its_weight() -> None:
    masters, shard, _ = made()
    before = elements(shard)
    shard.push(0, 0, 0, 3.0, ones(masters, 1.0))
    shard.push(0, 1, 0, 1.0, ones(masters, 3.0))
    assert torch.equal(elements(shard), before)  # not before it is applied
    assert shard.apply(0, 4.0, skip=False) == 1
    moved = before - elements(shard)
    held = torch.cat([view.detach().flatten() for view in masters.views])
    assert torch.isin(moved.unique(), torch.tensor([0.0, 0.5])).all() or torch.allclose(
        moved[moved.abs() > 0.1], torch.tensor(0.5)
    )
    assert held.numel() == sum(each.numel() for each in parameters())


def test_a_draw_that_comes_twice_counts_once_and_so_does_a_window() -> None:
    masters, shard, _ = made()
    once, alike, _ = made()
    for _ in range(2):
        shard.push(0, 0, 0, 1.0, ones(masters, 1.0))
    alike.push(0, 0, 0, 1.0, ones(once, 1.0))
    for target in (shard, shard, alike):
        target.apply(0, 1.0, skip=False)
    assert torch.equal(elements(shard), elements(alike))
    assert (shard.version, shard.steps) == (1, 1)


def test_what_is_pulled_is_not_changed_by_a_later_update() -> None:
    masters, shard, _ = made()
    _, _, pulled = shard.pull()
    copy = [each.clone() for each in pulled]
    shard.push(0, 0, 0, 1.0, ones(masters, 1.0))
    shard.apply(0, 1.0, skip=False)
    assert all(map(torch.equal, pulled, copy))


def test_a_window_left_out_changes_nothing_but_the_version() -> None:
    masters, shard, _ = made()
    before = elements(shard)
    shard.push(0, 0, 0, 1.0, ones(masters, float("nan")))
    assert shard.apply(0, 1.0, skip=True) == 1
    assert torch.equal(elements(shard), before)
    assert shard.steps == 0


@pytest.mark.parametrize("ages", [(0, 0), (1, 1), (0, 3), (2, 5)])
def test_by_age_a_gradient_is_taken_with_its_share_of_the_rate(ages: tuple[int, int]) -> None:
    """For plain SGD: lr / (1 + age) of each gradient, whatever else is in its window."""
    masters, shard, optimizer = made(by_age=True)
    shard.version = 10
    before = elements(shard)
    for number, (age, weight) in enumerate(zip(ages, (3.0, 1.0), strict=True)):
        shard.push(7, number, 10 - age, weight, ones(masters, weight * (number + 1)))
    shard.apply(7, 4.0, skip=False)
    step = 0.5 * (3.0 * 1 / (1 + ages[0]) + 1.0 * 2 / (1 + ages[1])) / 4.0
    moved = (before - elements(shard))[:60]
    assert torch.allclose(moved, torch.full_like(moved, step), atol=1e-6)
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_shards_tile_the_parameters_and_step_as_the_whole() -> None:
    whole_masters, whole, _ = made(momentum=0.9)
    parts = [made(rank, 3, momentum=0.9) for rank in range(3)]
    gradient = [
        torch.randn(flat.shape, generator=torch.Generator().manual_seed(5))
        for flat in whole_masters.flats
    ]
    for window in range(3):
        whole.push(window, 0, 0, 1.0, gradient)
        whole.apply(window, 2.0, skip=False)
        for masters, shard, _ in parts:
            mine = [each for each in masters.slices(gradient) if each.numel()]
            shard.push(window, 0, 0, 1.0, mine)
            shard.apply(window, 2.0, skip=False)
    assert torch.equal(torch.cat([elements(shard) for _, shard, _ in parts]), elements(whole))
    squares = sum(block.square().double().sum().item() for block in gradient)
    for masters, shard, _ in [*parts, (whole_masters, whole, None)]:
        shard.push(
            9,
            0,
            0,
            1.0,
            [each for each in masters.slices(gradient) if each.numel()],
        )
    assert sum(shard.squares(9) for _, shard, _ in parts) == pytest.approx(squares)
    assert whole.squares(9) == pytest.approx(squares)
    assert sum(parts[0][0].share(rank) for rank in range(3)) == pytest.approx(1)
