"""The server's parameters and its steps, without processes."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep.collectives.group import Group
from lockstep.data.window_loader import EpochCourse
from lockstep.errors import LockstepError
from lockstep.gradients.layout import plan
from lockstep.updates.server.schedule import Schedule
from lockstep.updates.server.server import Masters, Server
from tests.gradients.test_layout import entries

COURSE = EpochCourse(0, 0, 0, 9, 2, 2)


class Alone(Group):
    """Rank 0 of 2, which asks no other rank."""

    def __init__(self) -> None:
        self.rank, self.size = 0, 2


def server(clip: float | None = None) -> tuple[Masters, Server, torch.optim.Optimizer]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((40, 60), (60,), (0, 3), (3, 60))
    parameters = [nn.Parameter(torch.randn(*shape, generator=generator)) for shape in shapes]
    layout = plan(entries(*(parameter.numel() for parameter in parameters)), [3, 2, 1, 0])
    masters = Masters(parameters, layout, Alone(), owners=1)
    optimizer = torch.optim.SGD(masters.views, lr=0.5, momentum=0.9)
    updated: Any = SimpleNamespace(everyone=Alone(), optimizer=optimizer, scheduler=None, clip=clip)
    cut: Any = SimpleNamespace(shards=masters)
    return masters, Server(Schedule(2, math.inf), updated, cut), optimizer


def gradients(masters: Masters, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    flats = [torch.zeros_like(flat) for flat in masters.flats]
    for part in masters.parts(flats):  # padding stays 0
        part.copy_(torch.randn(part.shape, generator=generator))
    return flats


def window(server: Server, pushes: list[tuple[list[Tensor], float, float]]) -> list[Tensor]:
    """Both ranks push (gradients, loss, weight) of a window. Return what rank 0 pulls first."""
    server._schedule._back[1] = COURSE
    _, pulled = server.next(0, COURSE)
    server.next(1, COURSE)
    for rank, (flats, loss, weight) in enumerate(pushes):
        server.push(rank, [loss, weight, 1, 0], flats)
    return pulled


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
