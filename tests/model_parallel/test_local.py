"""Plain tensors in the memory of the cut ones: what is done to one is done to the other."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from lockstep.config.mesh import Mesh
from lockstep.model_parallel.local import Locals
from lockstep.model_parallel.sharded_parameters import shard_parameters, take_part, units_of
from lockstep.testing import run_ranks
from lockstep.world.world import World
from tests.model_parallel import cut_models as models
from tests.refused import refused


def one_memory(world: World, name: str, text: str) -> None:
    mesh = Mesh.read(text)
    model, here, _ = models.cut(world, name, mesh)
    given = models.share(name, mesh, world.rank)
    before = model(given[0]).detach()
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
    assert not model(given[0]).count_nonzero()


@pytest.mark.parametrize(
    ("name", "text"),
    [("gpt", "tensor=2"), ("odd", "shard=4"), ("gpt", "shard=3"), ("mlp", "shard=2,tensor=2")],
)
def test_they_lie_in_one_memory(name: str, text: str) -> None:
    run_ranks(one_memory, Mesh.read(text).size, args=(name, text))


def loaded(world: World, text: str) -> None:
    """FSDP keeps what it has gathered of the root for the backward; without one it is still
    there.
    """
    mesh = Mesh.read(text)
    model, here, _ = models.cut(world, "gpt", mesh)
    other = models.build("gpt")
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(5)))
        text_in = models.batch("gpt")[0]
        model(text_in)
        here.load(other.state_dict().items())
        torch.testing.assert_close(model(text_in), other(text_in), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("text", ["shard=2", "shard=3", "tensor=2"])
def test_what_is_loaded_is_what_computes_also_after_an_evaluation(text: str) -> None:
    run_ranks(loaded, Mesh.read(text).size, args=(text,))


def counts_and_refusals(world: World) -> None:
    mesh = Mesh(shard=2, tensor=2)
    model, here, axes = models.cut(world, "gpt", mesh)
    counted = torch.tensor(
        [sum(each.numel() for name, each in here.module.named_parameters() if here.counted(name))]
    )
    axes.model.all_reduce(counted).wait()
    assert counted.item() == sum(each.numel() for each in models.build("gpt").parameters())
    with refused("optimizer-not-elementwise", optimizer="torch.optim.lbfgs.LBFGS"):
        here.adopt(torch.optim.LBFGS(model.parameters()))
    with refused("optimizer-of-another-model", group=0, shape=[3]):
        here.adopt(torch.optim.SGD([nn.Parameter(torch.zeros(3))], lr=0.1))
    groups = [
        {"params": [p], "weight_decay": float(number)}
        for number, p in enumerate(model.parameters())
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.5)
    here.adopt(optimizer)
    for number, (group, parameter) in enumerate(
        zip(optimizer.param_groups, here.module.parameters(), strict=True)
    ):
        assert group["params"][0] is parameter
        assert (group["weight_decay"], group["lr"]) == (float(number), 0.5)
    models.backward(world, "gpt", mesh, model, here, axes)
    optimizer.step()
    with refused("optimizer-has-state", optimizer="AdamW"):
        here.adopt(optimizer)


def test_what_counts_and_what_is_refused() -> None:
    run_ranks(counts_and_refusals, 4)


def fewer_micro_batches(world: World) -> None:
    """Rank 1 has one micro-batch, rank 0 three, and their layers with buffers see only their
    own.
    """
    mesh = Mesh(shard=2)
    model, here, _ = models.cut(world, "odd", mesh)
    cuts = [(0, 2), (2, 5), (5, 12)] if world.rank == 0 else []
    for number in range(3):
        if number < len(cuts):
            models.loss(model, models.batch("odd", *cuts[number])).backward()
        else:
            model.seen.fill_(4.0)
            take_part(model, lambda: (model(models.batch("odd", 0, 1)[0]), model.seen.zero_())[0])
            assert model.seen.tolist() == [4.0] * 3
    here.collect()
    for key, parameter in models.alone("odd").named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(
                dict(here.module.named_parameters())[key].grad,
                here.take(key, parameter.grad),
                rtol=1e-5,
                atol=1e-5,
            )


def test_a_rank_without_micro_batches_takes_part_with_zeros() -> None:
    run_ranks(fewer_micro_batches, 2)


class Sometimes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, second: bool) -> torch.Tensor:
        return self.second(x) if second else self.first(x)


def different_layers(world: World) -> None:
    from lockstep.model_parallel.split_form import open_devices

    mesh = Mesh(shard=2)
    devices, _ = open_devices(mesh, world)
    model, whole = Sometimes(), Sometimes()
    shard_parameters(model, devices["shard"])
    here = Locals(model, mesh, world.rank)
    x = torch.arange(8.0).view(2, 4)
    model(x, world.rank == 1).sum().backward()
    here.collect()
    for second in (False, True):
        whole(x, second).sum().backward()
    for key, parameter in whole.named_parameters():
        torch.testing.assert_close(
            dict(here.module.named_parameters())[key].grad, here.take(key, parameter.grad)
        )


def test_ranks_may_use_different_parameters_of_a_unit() -> None:
    run_ranks(different_layers, 2)


def test_units_are_the_outermost_repeated_blocks() -> None:
    gpt, odd = models.build("gpt"), models.build("odd")
    assert units_of(gpt) == [gpt.blocks[0], gpt.blocks[1]]
    assert units_of(odd) == [odd.blocks[1]], "the first block is tied to a layer outside"
