"""Gradients of compiled modules leave during the backward, whoever compiles what."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lockstep
from lockstep.gradients.bucket import cut_by_buckets
from lockstep.testing import run_ranks
from tests import zoo


class Net(nn.Module):
    """Four layers of 1 MiB: as many cuts with buckets of 1 MiB."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *[nn.Sequential(nn.Linear(512, 512), nn.Tanh()) for _ in range(4)]
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Counting:
    """A compiler that counts its graphs."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        from torch._dynamo.backends.debugging import aot_eager

        self.graphs += 1
        return aot_eager(graph, inputs)


def data(rank: int) -> Tensor:
    return torch.randn(4, 512, generator=torch.Generator().manual_seed(rank))


def train(world: lockstep.World, kind: str) -> tuple[int, int, Tensor]:
    """Graphs, gradients to come when the first bucket left, the first layer's last gradient."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    model, count = Net(), Counting()
    forward: Any = model
    stepper = None
    if kind == "stepper":
        model.compile(backend=count)
        ddp = lockstep.DistributedDataParallel(model, bucket_cap_mb=1)
        reducer = ddp._averaging.reducer
        stepper = lockstep.Stepper(ddp, torch.optim.SGD(model.parameters(), lr=0.0))
    elif kind == "inside":
        model.compile(backend=count)
        forward = lockstep.DistributedDataParallel(model, bucket_cap_mb=1)
        reducer = forward._averaging.reducer
    else:
        ddp = lockstep.DistributedDataParallel(model, bucket_cap_mb=1)
        forward, reducer = torch.compile(ddp, backend=count), ddp._averaging.reducer
    assert reducer is not None
    to_come: list[int] = []
    reducer.on_launch = lambda bucket: to_come.append(reducer.ready.count(False))
    for _ in range(2):
        to_come.clear()
        model.zero_grad()
        if stepper is None:
            (forward(data(world.rank)).sum() / 4).backward()
            continue
        for x in stepper.micro_batches([data(world.rank)]):
            stepper.backward(forward(x).sum(), weight=4)
        stepper.step()
    grad = next(model.parameters()).grad
    assert grad is not None
    return count.graphs, to_come[0], grad.clone()


KINDS = ("inside", "outside", "stepper")


def each_kind(world: lockstep.World) -> list[tuple[int, int, Tensor]]:
    return [train(world, kind) for kind in KINDS]


def test_a_compiled_module_is_cut_where_buckets_end_and_overlaps() -> None:
    torch.manual_seed(0)
    plain = Net()
    for rank in range(2):
        (plain(data(rank)).sum() / 8).backward()
    expected = next(plain.parameters()).grad
    assert expected is not None
    for results in run_ranks(each_kind, 2):  # torch.compile leaves threads: no team
        for kind, (graphs, to_come, grad) in zip(KINDS, results, strict=True):
            assert graphs == 4, kind
            assert to_come >= 6, "the last bucket leaves when three layers have no gradient yet"
            assert zoo.distance(grad, expected) < 1e-6, kind


def test_the_setting_is_put_back_also_after_an_exception() -> None:
    ddp: Any = nn.parallel.DistributedDataParallel
    with pytest.raises(KeyError), cut_by_buckets(5 * 2**20):
        raise KeyError(ddp._active_ddp_module.bucket_bytes_cap)
    assert ddp._active_ddp_module is None
    with cut_by_buckets(5 * 2**20, wanted=False):
        assert ddp._active_ddp_module is None
