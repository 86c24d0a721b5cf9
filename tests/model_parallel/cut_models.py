"""Small models, how they are cut, and what one process computes of them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lockstep.config.mesh import Mesh
from lockstep.config.parts import Parts
from lockstep.model_parallel.local import Locals
from lockstep.model_parallel.sharded_parameters import shard_parameters
from lockstep.model_parallel.split_form import Axes, open_devices
from lockstep.model_parallel.tensor import plan_of, split_tensors
from lockstep.tasks import text
from lockstep.world.world import World

SAMPLES = 12  # so that 2, 3 and 4 ranks have equal shares of them
MLP_PLAN = {"0": "colwise", "2": "rowwise"}


class Odd(nn.Module):
    """Sizes that nothing divides, a frozen and a tied layer, few elements, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(7, 7), nn.Linear(7, 7)])
        self.frozen = nn.Linear(7, 7).requires_grad_(False)
        self.few = nn.Parameter(torch.randn(1, 7))
        self.register_buffer("seen", torch.zeros(3))
        self.tied = nn.Linear(7, 7, bias=False)
        self.tied.weight = self.blocks[0].weight
        self.last = nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + F.gelu(block(x))
        found: Tensor = self.last(self.tied(self.frozen(x)) * self.few)
        return found


class Words(nn.Module):
    """Tables cut by rows and by columns."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.columns = nn.Embedding(10, 6, padding_idx=3), nn.Embedding(10, 8)
        self.joined = nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.rows(x) * self.joined(self.columns(x))
        return found


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    if name == "gpt":
        return text.GPT(width=16, depth=2, length=8, dropout=0.0)
    if name == "odd":
        return Odd()
    if name == "words":
        return Words()
    return nn.Sequential(
        nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 6), nn.LayerNorm(6), nn.Linear(6, 5)
    )


def plan(name: str) -> dict[str, str]:
    if name == "words":
        return {"rows": "rowwise", "columns": "colwise", "joined": "rowwise"}
    return text.TENSOR if name == "gpt" else MLP_PLAN


def batch(name: str, start: int = 0, stop: int = SAMPLES) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    if name == "gpt":
        both = torch.randint(256, (SAMPLES, 9), generator=draw)
        return both[start:stop, :-1], both[start:stop, 1:]
    if name == "words":
        return (
            torch.randint(10, (SAMPLES,), generator=draw)[start:stop],
            torch.randint(6, (SAMPLES,), generator=draw)[start:stop],
        )
    width = 7 if name == "odd" else 6
    return (
        torch.randn(SAMPLES, width, generator=draw)[start:stop],
        torch.randint(5, (SAMPLES,), generator=draw)[start:stop],
    )


def loss(model: nn.Module, given: tuple[Tensor, Tensor]) -> Tensor:
    output = model(given[0])
    return F.cross_entropy(
        output.reshape(-1, output.shape[-1]), given[1].reshape(-1), reduction="sum"
    )


def cut(world: World, name: str, mesh: Mesh) -> tuple[nn.Module, Locals, Axes]:
    """A model as it is on this rank."""
    devices, axes = open_devices(mesh, world)
    model = build(name)
    if mesh.tensor > 1:
        parts = Parts(tensor=plan(name), heads=4 if name == "gpt" else None)
        split_tensors(model, plan_of(model, parts, mesh.tensor), devices["tensor"])
    shard_parameters(model, devices["shard"])
    return model, Locals(model, mesh, world.rank), axes


def share(name: str, mesh: Mesh, rank: int) -> tuple[Tensor, Tensor]:
    each = SAMPLES // mesh.replicas
    return batch(name, each * mesh.share(rank), each * (mesh.share(rank) + 1))


def backward(
    world: World, name: str, mesh: Mesh, model: nn.Module, locals_: Locals, axes: Axes
) -> None:
    """The gradients of all samples, in two micro-batches a rank."""
    inputs, targets = share(name, mesh, world.rank)
    half = len(inputs) // 2
    for part in (slice(0, half), slice(half, None)):
        loss(model, (inputs[part], targets[part])).backward()
        if name != "gpt":  # once for both, or after each
            locals_.collect()
    locals_.collect()
    for parameter in locals_.module.parameters():
        if parameter.requires_grad and axes.data.size > 1:
            axes.data.all_reduce(parameter.grad).wait()


def alone(name: str) -> nn.Module:
    """One process, with the gradients of all samples."""
    model = build(name)
    loss(model, batch(name)).backward()
    return model
