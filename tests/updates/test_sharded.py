"""The sharded update: the replicated one's bits, a share of its state, and a state dict that is
torch's own.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

import lockstep
from lockstep.errors import UsageError, WorkerFailed
from lockstep.testing import run_ranks

Make = Callable[[nn.Module], Optimizer]


class Net(nn.Module):
    """A scalar, a tied, a frozen and a channels_last parameter; one that is not a multiple of
    anything.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 17, 3, padding=1).to(memory_format=torch.channels_last)
        self.first = nn.Linear(17 * 16, 97)
        self.tied = nn.Linear(97, 97, bias=False)
        self.again = self.tied
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.frozen = nn.Parameter(torch.randn(97), requires_grad=False)
        self.head = nn.Linear(97, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x).relu().flatten(1)
        x = self.again(self.tied(self.first(x)).relu() + self.frozen) * self.scale
        y: Tensor = self.head(x)
        return y


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Two, with and without decay."""
    named = dict(model.named_parameters())
    return [
        {"params": [value for value in named.values() if value.dim() > 1], "weight_decay": 0.1},
        {
            "params": [
                value for value in named.values() if value.dim() < 2 and value.requires_grad
            ],
            "weight_decay": 0.0,
        },
    ]


def adamw(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(groups(model), lr=1e-2, fused=True)


def amsgrad(model: nn.Module) -> Optimizer:
    return torch.optim.Adam(groups(model), lr=1e-2, amsgrad=True, foreach=True)


def momentum(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(groups(model), lr=1e-2, momentum=0.9, nesterov=True)


def adagrad(model: nn.Module) -> Optimizer:
    return torch.optim.Adagrad(groups(model), lr=1e-2)


def asgd(model: nn.Module) -> Optimizer:
    return torch.optim.ASGD(groups(model), lr=1e-2, t0=1)


def nadam(model: nn.Module) -> Optimizer:
    return torch.optim.NAdam(groups(model), lr=1e-2)


def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    rows = 1 + (rank + step) % 3  # other weights on every rank
    return torch.randn(rows, 3, 4, 4, generator=generator), torch.randint(
        0, 5, (rows,), generator=generator
    )


def one_step(stepper: lockstep.Stepper, model: nn.Module, rank: int, step: int) -> Any:
    for x, y in stepper.micro_batches([batch(rank, step)]):
        stepper.backward(F.cross_entropy(model(x), y, reduction="sum"), weight=len(y))
    return stepper.step()


def bits(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def trained(
    world: lockstep.World, make: Make, update: str, reduce: str, clip: float | None
) -> tuple[list[Tensor], Any, float | None]:
    model = Net()
    optimizer = make(model)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    stepper = lockstep.Stepper(
        model, optimizer, update=update, reduce=reduce, clip=clip, scheduler=scheduler
    )
    for step in range(4):
        result = one_step(stepper, model, world.rank, step)
    assert all(
        parameter.grad is None or parameter.grad.shape == parameter.shape
        for parameter in model.parameters()
    )
    return bits(model), stepper.optimizer_state_dict(), result.norm


MAKES = (adamw, amsgrad, momentum, adagrad, asgd, nadam)
REDUCES = ("native", "shared_memory")
UPDATES = ("replicated", "sharded")


def trained_in_every_way(world: lockstep.World) -> dict[tuple[Make, str, str], Any]:
    return {
        (make, update, reduce): trained(
            world, make, update, reduce, 0.5 if make in (adamw, momentum) else None
        )
        for make, update, reduce in itertools.product(MAKES, UPDATES, REDUCES)
    }


@cache
def every(workers: int) -> list[dict[tuple[Make, str, str], Any]]:
    """By rank: ranks start once for all ways."""
    return run_ranks(trained_in_every_way, workers)


@pytest.mark.parametrize("make", MAKES)
@pytest.mark.parametrize("reduce", REDUCES)
def test_weights_and_state_have_the_replicated_updates_bits(make: Make, reduce: str) -> None:
    for workers in (1, 3):
        everyone = [found[make, update, reduce] for update in UPDATES for found in every(workers)]
        for other in everyone[1:]:
            assert same(other, everyone[0])


def held(world: lockstep.World) -> tuple[int, int]:
    """Elements of optimizer state here, and of the whole model."""
    model = nn.Sequential(nn.Linear(300, 200), nn.Linear(200, 100))
    optimizer = torch.optim.AdamW(model.parameters())
    stepper = lockstep.Stepper(model, optimizer, update="sharded")
    for x in stepper.micro_batches([torch.randn(2, 300)]):
        stepper.backward(model(x).sum(), weight=2)
    stepper.step()
    elements = sum(
        value.numel()
        for state in optimizer.state.values()
        for value in state.values()
        if value.dim()
    )
    return elements, sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("workers", [2, 3, 8])
def test_a_rank_holds_its_share_of_the_state(workers: int) -> None:
    found = run_ranks(held, workers)
    parameters = found[0][1]
    assert sum(elements for elements, _ in found) == 2 * parameters
    assert max(elements for elements, _ in found) <= 2 * (parameters / workers + 2048)


def resumed(world: lockstep.World, state: Any, update: str) -> list[Tensor]:
    model = Net()
    model.load_state_dict(state["model"])
    optimizer = adamw(model)
    stepper = lockstep.Stepper(model, optimizer, update=update, reduce="native")
    stepper.load_optimizer_state_dict(state["optimizer"])
    for step in (2, 3):
        # the same data on all ranks: then their number does not matter but for rounding
        one_step(stepper, model, 0, step)
    return bits(model)


def saved(world: lockstep.World) -> Any:
    model = Net()
    stepper = lockstep.Stepper(model, adamw(model), update="sharded")
    for step in (0, 1):
        one_step(stepper, model, 0, step)
    return {
        "model": {name: value.clone() for name, value in model.state_dict().items()},
        "optimizer": stepper.optimizer_state_dict(),
    }


def test_state_goes_over_to_another_number_of_ranks_and_to_the_other_update() -> None:
    state = run_ranks(saved, 3)[1]
    plain = adamw(Net())
    plain.load_state_dict(state["optimizer"])  # torch's own form
    assert plain.state_dict()["param_groups"] == state["optimizer"]["param_groups"]
    expected = run_ranks(resumed, 1, args=(state, "replicated"))[0]
    for workers, update in ((1, "sharded"), (2, "sharded"), (4, "sharded"), (2, "replicated")):
        for found in run_ranks(resumed, workers, args=(state, update)):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def grown(world: lockstep.World, update: str) -> tuple[list[Tensor], Any]:
    """A layer is unfrozen after two steps, another is added with a group of its own."""
    model = nn.ModuleDict({"a": nn.Linear(40, 50), "b": nn.Linear(50, 30)})
    torch.manual_seed(1)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    model["a"].weight.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    stepper = lockstep.Stepper(model, optimizer, update=update, reduce="shared_memory")
    for step in range(6):
        if step == 2:
            model["a"].weight.requires_grad_(True)
        if step == 3:
            model["c"] = nn.Linear(30, 20)
            optimizer.add_param_group({"params": list(model["c"].parameters()), "lr": 3e-2})
        if step == 5:
            model["b"].requires_grad_(False)
        generator = torch.Generator().manual_seed(10 * step + world.rank)
        for x in stepper.micro_batches([torch.randn(3, 40, generator=generator)]):
            y = model["b"](model["a"](x).relu())
            stepper.backward((model["c"](y) if step > 2 else y).square().sum(), weight=3)
        stepper.step()
    return bits(model), stepper.optimizer_state_dict()


def test_layers_are_unfrozen_added_and_frozen() -> None:
    everyone = run_ranks(grown, 2, args=("replicated",)) + run_ranks(grown, 2, args=("sharded",))
    for other in everyone[1:]:
        assert same(other, everyone[0])


def refused(world: lockstep.World) -> None:
    model = nn.Linear(3, 3)
    lockstep.Stepper(model, torch.optim.Adafactor(model.parameters()), update="sharded")


def test_an_optimizer_that_looks_across_elements_is_refused() -> None:
    with pytest.raises(WorkerFailed, match=r"Adafactor.*\[optimizer-not-elementwise\]"):
        run_ranks(refused, 2)


def test_an_unknown_update_is_refused() -> None:
    model = nn.Linear(3, 3)
    with (
        lockstep.init(backend="gloo"),
        pytest.raises(
            UsageError,
            match=r"update='shared' .*\[unknown-choice\]",
        ),
    ):
        lockstep.Stepper(model, torch.optim.SGD(model.parameters()), update="shared")


def overflown(world: lockstep.World, update: str) -> tuple[bool, list[Tensor]]:
    model = Net()
    stepper = lockstep.Stepper(model, adamw(model), update=update, clip=1.0)
    one_step(stepper, model, world.rank, 0)
    for x, y in stepper.micro_batches([batch(world.rank, 1)]):
        factor = torch.inf if world.rank == 1 else 1.0
        stepper.backward(
            F.cross_entropy(model(x), y, reduction="sum") + 0 * factor * model(x).sum(),
            weight=len(y),
        )
    with pytest.warns(lockstep.errors.LockstepWarning) if world.rank == 0 else torch.no_grad():
        result = stepper.step()
    return result.applied, bits(model)


def test_an_overflow_on_one_rank_skips_the_step_on_all() -> None:
    found = run_ranks(overflown, 2, args=("sharded",))
    assert [applied for applied, _ in found] == [False, False]
    assert same(found[0][1], found[1][1])
    assert all(value.isfinite().all() for value in found[0][1])


def with_scaler(world: lockstep.World, update: str) -> tuple[list[Tensor], Any]:
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 4))
    torch.manual_seed(2)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4, growth_interval=2)
    stepper = lockstep.Stepper(
        model, torch.optim.SGD(model.parameters(), lr=0.1), update=update, scaler=scaler
    )
    for step in range(4):
        generator = torch.Generator().manual_seed(10 * step + world.rank)
        for x in stepper.micro_batches([torch.randn(4, 64, generator=generator)]):
            loss = model(x).square().sum()
            stepper.backward(loss * (torch.inf if step == 2 and world.rank == 0 else 1), weight=4)
        stepper.step()
    return bits(model), scaler.state_dict()


def test_a_scaler_has_the_same_state_on_all_ranks() -> None:
    everyone = run_ranks(with_scaler, 2, args=("replicated",)) + run_ranks(
        with_scaler, 2, args=("sharded",)
    )
    # twice as much after two steps, half of it after the overflow
    assert everyone[0][1]["scale"] == 2.0**4
    for other in everyone[1:]:
        assert same(other, everyone[0])
