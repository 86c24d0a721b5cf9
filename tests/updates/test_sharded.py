"""The sharded update: the replicated one's bits, a share of its state, torch's state dict."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import lockstep
from tests import zoo
from tests.refused import refused
from tests.step.walking import same, walk, weights
from tests.teams import on_team
from tests.updates.nets import Net, adamw, batch, groups

UPDATES = ("replicated", "sharded")
OPTIMIZERS: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"fused": True}),
    "amsgrad": (torch.optim.Adam, {"amsgrad": True, "foreach": True}),
    "momentum": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "adagrad": (torch.optim.Adagrad, {}),
    "asgd": (torch.optim.ASGD, {"t0": 1}),
    "nadam": (torch.optim.NAdam, {}),
}


def trained(world: lockstep.World, name: str, reduce: str) -> list[Any]:
    """Weights and state after four steps, by update."""
    kind, options = OPTIMIZERS[name]
    results = []
    for update in UPDATES:
        model = Net()
        optimizer = kind(groups(model), lr=1e-2, **options)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        stepper = lockstep.Stepper(
            model,
            optimizer,
            update=update,
            reduce=reduce,
            clip=0.5 if name in ("adamw", "momentum") else None,
            scheduler=scheduler,
        )
        for step in range(4):
            result = walk(stepper, [batch(world.rank, step)])
        for parameter in model.parameters():
            assert parameter.grad is None or parameter.grad.shape == parameter.shape
        results.append((weights(model), stepper.optimizer_state_dict(), result.norm))
    return results


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_weights_and_state_have_the_replicated_updates_bits(name: str) -> None:
    for workers, reduce in itertools.product((1, 3), ("native", "shared_memory")):
        ranks = on_team(trained, workers, (name, reduce))
        expected = ranks[0][0]
        for result in itertools.chain.from_iterable(ranks):
            assert same(result, expected), (workers, reduce)


def held(world: lockstep.World) -> tuple[int, int]:
    """Elements of optimizer state here, and of the whole model."""
    model = nn.Sequential(nn.Linear(300, 200), nn.Linear(200, 100))
    optimizer = torch.optim.AdamW(model.parameters())
    stepper = lockstep.Stepper(model, optimizer, update="sharded")
    for x in stepper.micro_batches([torch.randn(2, 300)]):
        stepper.backward(model(x).sum(), weight=2)
    stepper.step()
    states = itertools.chain.from_iterable(state.values() for state in optimizer.state.values())
    elements = sum(value.numel() for value in states if value.dim())
    return elements, sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("workers", [2, 3, 8])
def test_a_rank_holds_its_share_of_the_state(workers: int) -> None:
    elements, (parameters, *_) = zip(*on_team(held, workers), strict=True)
    assert sum(elements) == 2 * parameters
    assert max(elements) <= 2 * (parameters / workers + 2048)


def saved(world: lockstep.World) -> Any:
    model = Net()
    stepper = lockstep.Stepper(model, adamw(model), update="sharded")
    for step in (0, 1):
        walk(stepper, [batch(0, step)])
    state = {name: value.clone() for name, value in model.state_dict().items()}
    return {"model": state, "optimizer": stepper.optimizer_state_dict()}


def resumed(world: lockstep.World, state: Any, update: str) -> list[Tensor]:
    """With the same data on all ranks: then their number does not matter but for rounding."""
    model = Net()
    model.load_state_dict(state["model"])
    stepper = lockstep.Stepper(model, adamw(model), update=update, reduce="native")
    stepper.load_optimizer_state_dict(state["optimizer"])
    for step in (2, 3):
        walk(stepper, [batch(0, step)])
    return weights(model)


def test_state_goes_over_to_another_number_of_ranks_and_to_the_other_update() -> None:
    state = on_team(saved, 3)[1]
    plain = adamw(Net())
    plain.load_state_dict(state["optimizer"])  # torch's own form
    assert plain.state_dict()["param_groups"] == state["optimizer"]["param_groups"]
    (expected,) = on_team(resumed, 1, (state, "replicated"))
    for workers, update in ((1, "sharded"), (2, "sharded"), (8, "sharded"), (2, "replicated")):
        for ours in on_team(resumed, workers, (state, update)):
            pairs = zip(ours, expected, strict=True)
            assert max(zoo.distance(one, other) for one, other in pairs) < 1e-5


def by_each_update(world: lockstep.World, train: Callable[..., Any]) -> list[Any]:
    return [train(world, update) for update in UPDATES]


def grown(world: lockstep.World, update: str) -> tuple[list[Tensor], Any]:
    """A layer is unfrozen after two steps, and joins the optimizer after four; another is added with
    a group of its own.
    """
    torch.manual_seed(1)
    model = nn.ModuleDict({"a": nn.Linear(40, 50), "b": nn.Linear(50, 30)})
    model["a"].weight.requires_grad_(False)
    first = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(first, lr=1e-2)
    stepper = lockstep.Stepper(model, optimizer, update=update, reduce="shared_memory")
    for step in range(6):
        if step == 2:
            model["a"].weight.requires_grad_(True)
        if step == 3:
            model["c"] = nn.Linear(30, 20)
            optimizer.add_param_group({"params": list(model["c"].parameters()), "lr": 3e-2})
        if step == 4:
            optimizer.add_param_group({"params": [model["a"].weight]})
        if step == 5:
            model["b"].requires_grad_(False)
        generator = torch.Generator().manual_seed(10 * step + world.rank)
        for x in stepper.micro_batches([torch.randn(3, 40, generator=generator)]):
            y = model["b"](model["a"](x).relu())
            stepper.backward((model["c"](y) if step > 2 else y).square().sum(), weight=3)
        stepper.step()
    return weights(model), stepper.optimizer_state_dict()


def with_scaler(world: lockstep.World, update: str) -> tuple[list[Tensor], Any]:
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 4))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4, growth_interval=2)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    stepper = lockstep.Stepper(model, sgd, update=update, scaler=scaler, clip=10.0)
    for step in range(4):
        generator = torch.Generator().manual_seed(10 * step + world.rank)
        for x in stepper.micro_batches([torch.randn(4, 64, generator=generator)]):
            loss = model(x).square().sum()
            stepper.backward(loss * (torch.inf if step == 2 and world.rank == 0 else 1), weight=4)
        stepper.step()
    # twice as much after two steps, half of it after the overflow, of which nothing stays
    assert scaler.state_dict()["scale"] == 2.0**4
    return weights(model), scaler.state_dict()


@pytest.mark.parametrize("train", [grown, with_scaler])
def test_layers_that_come_and_go_and_a_scaler_are_as_in_the_replicated_update(
    train: Callable[..., Any],
) -> None:
    ranks = on_team(by_each_update, 2, (train,))
    for result in itertools.chain.from_iterable(ranks):
        assert same(result, ranks[0][0])


def test_an_optimizer_that_looks_across_elements_is_refused() -> None:
    model = nn.Linear(3, 3)
    optimizer = torch.optim.Adafactor(model.parameters())
    with lockstep.init(backend="gloo"), refused("optimizer-not-elementwise"):
        lockstep.Stepper(model, optimizer, update="sharded")
