"""Compiled modules: gradients leave during the backward, whoever compiles what, and nothing of ours
makes the compiler start anew or break a graph.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

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


class Noisy(nn.Module):
    """With BatchNorm, whose statistics a step puts back, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 3)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


DOORS = ("wrapper inside", "wrapper outside", "stepper", "stepper with a wrapper", "prepare")


def settled(world: lockstep.World, door: str) -> tuple[int, int, dict[str, int]]:
    """How many graphs there are after the second window, after the sixth, and the graph breaks."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    breaks = torch._dynamo.utils.counters["graph_break"]
    breaks.clear()
    model, count = Noisy(), Counting()
    optimizer = torch.optim.AdamW(model.parameters())
    graphs = []
    if door == "prepare":
        model.compile(backend=count)
        samples = TensorDataset(torch.randn(96, 6), torch.randint(3, (96,)))
        prepared, optimizer, loader = lockstep.prepare(
            model, optimizer, DataLoader(samples, batch_size=16), micro_batch=4, world=world
        )
        for x, y in loader:
            F.cross_entropy(prepared(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            if loader.stepped:
                graphs.append(count.graphs)
        return graphs[1], graphs[-1], dict(breaks)
    forward: Any = model
    if door == "wrapper outside":
        forward = torch.compile(lockstep.DistributedDataParallel(model), backend=count)
    else:
        model.compile(backend=count)
        if door != "stepper":
            forward = lockstep.DistributedDataParallel(model)
    stepper = None
    if door.startswith("stepper"):
        stepper = lockstep.Stepper(model if door == "stepper" else forward, optimizer)
    generator = torch.Generator().manual_seed(world.rank)
    for _ in range(6):
        batches = [torch.randn(4, 6, generator=generator) for _ in range(2)]
        if stepper is not None:
            for x in stepper.micro_batches(batches):
                stepper.backward(forward(x).square().sum(), weight=4)
            stepper.step()
        else:
            with forward.no_sync():
                forward(batches[0]).square().sum().backward()
            forward(batches[1]).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        graphs.append(count.graphs)
    return graphs[1], graphs[-1], dict(breaks)


def at_each_door(world: lockstep.World) -> list[tuple[int, int, dict[str, int]]]:
    return [settled(world, door) for door in DOORS]


@pytest.mark.parametrize("size", [1, 2])
def test_no_door_compiles_anew_after_the_second_window_or_breaks_a_graph(size: int) -> None:
    for results in run_ranks(at_each_door, size):
        for door, (second, last, breaks) in zip(DOORS, results, strict=True):
            assert second > 0, door
            assert last == second, door
            assert not breaks, door
