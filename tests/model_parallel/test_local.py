"""Plain tensors in the memory of cut ones; a cut model trains as one process does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lockstep.config.mesh import Mesh
from lockstep.model_parallel.local import Locals
from lockstep.model_parallel.sharded_parameters import shard_parameters, take_part, units_of
from lockstep.model_parallel.split_form import open_devices
from lockstep.world.world import World
from tests.model_parallel import cut_models as models
from tests.refused import refused
from tests.teams import on_team


def close(ours: Tensor | None, expected: Tensor, what: str, bound: float = 1e-5) -> None:
    torch.testing.assert_close(
        ours, expected, rtol=bound, atol=bound, msg=lambda text: f"{what}: {text}"
    )


def trains(world: World, name: str, mesh: Mesh) -> None:
    """Three steps have the gradients and the weights of one process."""
    model, here, axes = models.cut(world, name, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    here.adopt(optimizer)
    whole = models.alone(name)
    theirs = torch.optim.AdamW(whole.parameters(), lr=0.01)
    for step in range(3):
        models.backward(world, name, mesh, model, here, axes)
        ours = dict(here.module.named_parameters())
        assert ours.keys() == dict(whole.named_parameters()).keys()
        for key, parameter in whole.named_parameters():
            if parameter.grad is None:
                assert not parameter.requires_grad
                assert ours[key].grad is None
                continue
            # later, gradients are of weights that AdamW has brought apart: it magnifies what is
            # small
            bound = 1e-5 if step == 0 else 1e-4
            expected = here.part(key, parameter.grad)
            close(ours[key].grad, expected, f"step {step}, gradient of {key}", bound)
        optimizer.step()
        theirs.step()
        for key, parameter in whole.named_parameters():
            expected = here.part(key, parameter.detach())
            close(ours[key].detach(), expected, f"step {step}, {key}", 1e-4)
        optimizer.zero_grad()
        theirs.zero_grad()
        models.loss(whole, models.batch(name)).backward()


def one_memory(world: World, name: str, mesh: Mesh) -> None:
    """What is written to the plain tensors is in the cut ones."""
    model, here, _ = models.cut(world, name, mesh)
    inputs, _ = models.share(name, mesh, world.rank)
    before = model(inputs).detach()
    cut = dict(model.named_parameters(remove_duplicate=False))
    for key, parameter in here.module.named_parameters(remove_duplicate=False):
        assert not isinstance(parameter, DTensor)
        if isinstance(cut[key], DTensor):
            assert parameter.shape == cut[key].to_local().shape
        with torch.no_grad():
            parameter.zero_()
    for module in model.modules():
        if hasattr(module, "reshard"):
            module.reshard()
    for parameter in model.parameters():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        assert not local.count_nonzero()
    assert before.count_nonzero()
    assert not model(inputs).count_nonzero()


def loaded(world: World, name: str, mesh: Mesh) -> None:
    """What is loaded is what computes, also after an evaluation, of which FSDP keeps the root."""
    model, here, _ = models.cut(world, name, mesh)
    other = models.build(name)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(5)))
        inputs, _ = models.batch(name)
        model(inputs)
        here.load(other.state_dict().items())
        close(model(inputs), other(inputs), "the output")


def adopts(world: World, name: str, mesh: Mesh) -> None:
    """Every element counts once, and an optimizer of the cut model goes on with the plain one."""
    model, here, axes = models.cut(world, name, mesh)
    counted = [
        parameter.numel() for key, parameter in here.module.named_parameters() if here.counted(key)
    ]
    total = torch.tensor([sum(counted)])
    axes.model.all_reduce(total).wait()
    assert total.item() == sum(parameter.numel() for parameter in models.build(name).parameters())
    with refused("optimizer-not-elementwise", optimizer="torch.optim.lbfgs.LBFGS"):
        here.adopt(torch.optim.LBFGS(model.parameters()))
    with refused("optimizer-of-another-model", group=0, shape=[3]):
        here.adopt(torch.optim.SGD([nn.Parameter(torch.zeros(3))], lr=0.1))
    groups = [
        {"params": [parameter], "weight_decay": float(number)}
        for number, parameter in enumerate(model.parameters())
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.5)
    here.adopt(optimizer)
    for number, (group, parameter) in enumerate(
        zip(optimizer.param_groups, here.module.parameters(), strict=True)
    ):
        assert group["params"][0] is parameter
        assert (group["weight_decay"], group["lr"]) == (float(number), 0.5)
    models.backward(world, name, mesh, model, here, axes)
    optimizer.step()
    with refused("optimizer-has-state", optimizer="AdamW"):
        here.adopt(optimizer)


def fewer_micro_batches(world: World, name: str, mesh: Mesh) -> None:
    """Rank 1 has no micro-batch, rank 0 three, and their layers with buffers see only their own."""
    model, here, _ = models.cut(world, name, mesh)
    cuts = [(0, 2), (2, 5), (5, 12)] if world.rank == 0 else []
    for number in range(3):
        if number < len(cuts):
            models.loss(model, models.batch(name, *cuts[number])).backward()
        else:
            model.seen.fill_(4.0)
            take_part(model, lambda: (model(models.batch(name, 0, 1)[0]), model.seen.zero_())[0])
            assert model.seen.tolist() == [4.0] * 3
    here.collect()
    ours = dict(here.module.named_parameters())
    for key, parameter in models.alone(name).named_parameters():
        if parameter.grad is not None:
            close(ours[key].grad, here.part(key, parameter.grad), key)


class Sometimes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, second: bool) -> Tensor:
        return self.second(x) if second else self.first(x)


def different_layers(world: World, name: str, mesh: Mesh) -> None:
    """Ranks may use different parameters of a unit."""
    devices, _ = open_devices(mesh, world)
    model, whole = Sometimes(), Sometimes()
    shard_parameters(model, devices["shard"])
    here = Locals(model, mesh, world.rank)
    x = torch.arange(8.0).view(2, 4)
    model(x, world.rank == 1).sum().backward()
    here.collect()
    for second in (False, True):
        whole(x, second).sum().backward()
    ours = dict(here.module.named_parameters())
    for key, parameter in whole.named_parameters():
        assert parameter.grad is not None
        close(ours[key].grad, here.part(key, parameter.grad), key)


Case = Callable[[World, str, Mesh], None]
CASES: list[tuple[Case, str, str]] = [
    *[(trains, "gpt", mesh) for mesh in ("tensor=2", "shard=2", "shard=3", "shard=2,tensor=2")],
    *[(trains, "gpt", mesh) for mesh in ("tensor=4", "data=2,tensor=2")],
    (trains, "words", "shard=2,tensor=2"),
    *[(trains, "odd", mesh) for mesh in ("shard=3", "data=2,shard=2")],
    *[(one_memory, "odd", mesh) for mesh in ("shard=3", "shard=4")],
    *[(one_memory, "gpt", mesh) for mesh in ("tensor=2", "shard=2,tensor=2")],
    *[(loaded, "gpt", mesh) for mesh in ("shard=2", "shard=3", "tensor=2")],
    (adopts, "gpt", "shard=2,tensor=2"),
    (fewer_micro_batches, "odd", "shard=2"),
    (different_layers, "sometimes", "shard=2"),
]


def each_case(world: World) -> None:
    for case, name, text in CASES:
        mesh = Mesh.read(text)
        if mesh.size == world.size:
            try:
                case(world, name, mesh)
            except Exception as error:
                error.add_note(f"{case.__name__}: {name} over {text}")
                raise


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.rest), 3, 4])
def test_a_cut_model_is_that_of_one_process(size: int) -> None:
    on_team(each_case, size)


def test_units_are_the_outermost_repeated_blocks() -> None:
    gpt, odd = models.build("gpt"), models.build("odd")
    assert units_of(gpt) == [gpt.blocks[0], gpt.blocks[1]]
    assert units_of(odd) == [odd.blocks[1]], "the first block is tied to a layer outside"
