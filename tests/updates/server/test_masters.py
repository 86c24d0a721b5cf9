"""The server's parameters and its steps, without processes."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep.collectives.group import Group
from lockstep.data.epoch import EpochCourse
from lockstep.errors import LockstepError
from lockstep.gradients.layout import Entry, plan
from lockstep.updates.server.schedule import Schedule
from lockstep.updates.server.server import Masters, Server

COURSE = EpochCourse(0, 0, 0, 9, 2, 2)


class Alone(Group):
    """Rank `rank` of `size`, which asks no other rank."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


def parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [
        nn.Parameter(torch.randn(*shape, generator=generator))
        for shape in ((40, 60), (60,), (0, 3), (3, 60))
    ]


def masters_of(rank: int) -> Masters:
    params = parameters()
    entries = [
        Entry(str(number), each.numel(), each.dtype, each.device)
        for number, each in enumerate(params)
    ]
    return Masters(params, plan(entries, [3, 2, 1, 0]), Alone(rank, 2), owners=1)


def server(clip: float | None = None) -> tuple[Masters, Server, torch.optim.Optimizer]:
    masters = masters_of(0)
    optimizer = torch.optim.SGD(masters.views, lr=0.5, momentum=0.9)
    updated: Any = SimpleNamespace(
        everyone=Alone(0, 2), optimizer=optimizer, scheduler=None, clip=clip
    )
    cut: Any = SimpleNamespace(shards=masters)
    return masters, Server(Schedule(2, math.inf), updated, cut), optimizer


def gradients(masters: Masters, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    flats = [torch.zeros_like(flat) for flat in masters.flats]
    for part in masters.parts(flats):  # padding stays 0
        part.copy_(torch.randn(part.shape, generator=generator))
    return flats


def window(server: Server, pushes: list[tuple[list[Tensor], float, float]]) -> list[Tensor]:
    """Both ranks draw one slot of a window, and push (gradients, loss, weight). Return what rank 0
    pulls first.
    """
    server._schedule._back[1] = COURSE
    _, pulled = server.next(0, COURSE)
    server.next(1, COURSE)
    for rank, (flats, loss, weight) in enumerate(pushes):
        server.push(rank, [loss, weight, 1, 0], flats)
    return pulled


def test_rank_0_has_every_parameter_and_the_others_none() -> None:
    params, masters = parameters(), masters_of(0)
    for parameter in params:
        assert sum(map(torch.Tensor.numel, masters.mine_of(parameter))) == 0
    for parameter in masters.parameters:
        (view,) = masters.mine_of(parameter) or [torch.empty(0)]
        assert torch.equal(view.detach(), parameter.detach().flatten())
    assert masters_of(1).views == []


@pytest.mark.parametrize("clip", [None, 0.5])
def test_a_window_is_its_sum_over_its_weight(clip: float | None) -> None:
    masters, target, _ = server(clip)
    params = parameters()
    reference = torch.optim.SGD(params, lr=0.5, momentum=0.9)
    for seed in range(3):
        ours, theirs = gradients(masters, seed), gradients(masters, 10 + seed)
        window(target, [(ours, 1.0, 3.0), (theirs, 1.0, 1.0)])
        total = [(a + b) / 4 for a, b in zip(ours, theirs, strict=True)]
        for view, gradient in zip(masters.views, masters.parts(total), strict=True):
            (number,) = [
                piece.parameter
                for piece, other in zip(masters.pieces, masters.views, strict=True)
                if other is view
            ]
            params[number].grad = gradient.view(params[number].shape)
        if clip is not None:
            nn.utils.clip_grad_norm_(params, clip)
        reference.step()
    for piece, view in zip(masters.pieces, masters.views, strict=True):
        assert torch.allclose(view, params[piece.parameter].flatten(), atol=1e-6)
    assert [done.weight for done in target.applied()] == [4.0] * 3
    assert target.applied() == ()


@pytest.mark.parametrize(
    ("loss", "weight", "value"), [(1.0, 0.0, 1.0), (math.nan, 1.0, 1.0), (1.0, 1.0, math.inf)]
)
def test_a_window_that_is_not_finite_or_empty_is_skipped(
    loss: float, weight: float, value: float
) -> None:
    masters, target, optimizer = server(clip=1.0)
    flats = [torch.full_like(flat, value) for flat in masters.flats]
    pulled = window(target, [(flats, loss, weight), (flats, loss, weight)])
    header, after = target.next(0, COURSE)
    assert header[5] == 0  # steps of the optimizer
    assert not optimizer.state
    assert all(map(torch.equal, pulled, after))
    (skipped,) = target.applied()
    assert skipped.reason


def test_age_counts_the_windows_that_were_applied_since_the_pull() -> None:
    masters, target, _ = server()
    target._schedule._back[1] = COURSE
    target.next(0, COURSE)
    target.next(1, COURSE)
    target.push(0, [1.0, 1.0, 1, 0], gradients(masters, 0))
    for seed in range(4):  # rank 0 computes two whole windows before rank 1 pushes
        target.next(0, COURSE)
        target.push(0, [1.0, 1.0, 1, 0], gradients(masters, seed))
    target.push(1, [1.0, 1.0, 1, 0], gradients(masters, 9))
    done = target.applied()
    assert [(each.step, each.age) for each in done] == [(1, 0), (2, 0), (0, 2)]
    assert [each.samples_by_rank for each in done] == [(2, 0), (2, 0), (1, 1)]


def test_after_an_optimizer_has_failed_no_rank_gets_work() -> None:
    """Else rank 0 could wait for the others in a synchronization, where it hears of no error."""
    masters, target, optimizer = server()

    def fail(*_: Any) -> None:
        raise RuntimeError("on purpose")

    optimizer.register_step_pre_hook(fail)
    flats = gradients(masters, 0)
    with pytest.raises(RuntimeError, match="on purpose"):
        window(target, [(flats, 1.0, 1.0), (flats, 1.0, 1.0)])
    with pytest.raises(LockstepError) as failed:
        target.next(0, COURSE)
    assert failed.value.code == "server-failed"


def test_what_was_pulled_is_not_changed_by_a_later_update() -> None:
    masters, target, _ = server()
    flats = gradients(masters, 0)
    pulled = window(target, [(flats, 1.0, 1.0), (flats, 1.0, 1.0)])
    assert not any(map(torch.equal, pulled, masters.flats))
