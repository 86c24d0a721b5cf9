"""What code written for torch's DDP does to its wrapper: keywords, hooks, checkpointing, groups,
odd inputs and outputs.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh

import lockstep
from lockstep.errors import WorkerFailed
from lockstep.testing import run_ranks
from lockstep.world.world import World
from tests import zoo
from tests.refused import refused
from tests.teams import on_team

Pair = namedtuple("Pair", "logits features")
WRAPPERS = {
    "torch": nn.parallel.DistributedDataParallel,
    "lockstep": lockstep.DistributedDataParallel,
}


def gradients(model: nn.Module) -> list[Tensor]:
    return [
        parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None
    ]


def mean_gradients(model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """Those of one process, over two batches."""
    for x, y in batches:
        (zoo.loss_sum(model(x), y) / 2).backward()
    return gradients(model)


def compare(ours: Iterable[Tensor], theirs: Iterable[Tensor], bound: float = 1e-6) -> None:
    for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        assert zoo.distance(one, other) < bound, number


class Outputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 6)
        self.heads = nn.ModuleDict({"a": nn.Linear(6, 3), "b": nn.Linear(6, 3)})

    def forward(self, x: Tensor) -> dict[str, object]:
        features = torch.tanh(self.body(x))
        return {"a": self.heads["a"](features), "more": Pair(self.heads["b"](features), [features])}


def loss_of(output: object, y: Tensor) -> Tensor:
    if isinstance(output, dict):
        return zoo.loss_sum(output["a"], y) + zoo.loss_sum(output["more"].logits, y)
    assert isinstance(output, Tensor)
    return zoo.loss_sum(output, y)


def train(ddp: nn.Module, rank: int, steps: int, momentum: float = 0.0) -> list[Tensor]:
    sgd = torch.optim.SGD(ddp.parameters(), lr=0.02, momentum=momentum)
    for step in range(steps):
        x, y = zoo.batch(rank, step)
        sgd.zero_grad()
        loss_of(ddp(x), y).backward()
        sgd.step()
    return zoo.weights(ddp)


def swapped(world: lockstep.World, wrapper: str) -> list[Tensor]:
    """One script; only the wrapper's import differs."""
    torch.manual_seed(4)
    ddp = WRAPPERS[wrapper](Outputs(), gradient_as_bucket_view=wrapper == "torch")
    return train(ddp, world.rank, 20, momentum=0.9)


def test_swapping_the_import_gives_the_same_weights() -> None:
    """promises/test_same_gradients.py and contract/test_wrapper.py have other models and uses."""
    for ours, theirs in zip(
        on_team(swapped, 2, ("lockstep",)), on_team(swapped, 2, ("torch",)), strict=True
    ):
        compare(ours, theirs)


def penalized(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    output = model(x)
    (slope,) = torch.autograd.grad(output.square().sum(), x, create_graph=True)
    return zoo.loss_sum(output, y) + slope.square().sum()


def with_penalty(world: lockstep.World, option: str) -> list[Tensor]:
    model = zoo.build("mlp")
    ddp = lockstep.DistributedDataParallel(model, **{option: True})
    for number in range(2):
        model.zero_grad()
        penalized(ddp, *zoo.batch(world.rank, number)).backward()
    return gradients(model)


@pytest.mark.parametrize("option", ["static_graph", "find_unused_parameters"])
def test_a_gradient_in_the_loss_is_no_backward(option: str) -> None:
    model = zoo.build("mlp")
    for rank in range(2):
        (penalized(model, *zoo.batch(rank, 1)) / 2).backward()
    for ours in on_team(with_penalty, 2, (option,)):
        compare(ours, gradients(model))


HOOKS: dict[str, Callable[[Any, Any], Any]] = {
    "mean": default_hooks.allreduce_hook,
    "fp16": default_hooks.fp16_compress_hook,
    "powersgd": powerSGD_hook.powerSGD_hook,
}


def hooked(world: lockstep.World, wrapper: str, hook: str) -> list[Tensor]:
    ddp = WRAPPERS[wrapper](zoo.build("mlp"))
    state = None
    if hook == "powersgd":
        state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=2, start_powerSGD_iter=3, min_compression_rate=0.5
        )
    ddp.register_comm_hook(state, HOOKS[hook])
    return train(ddp, world.rank, 6)


@pytest.mark.parametrize(("hook", "bound"), [("mean", 1e-6), ("fp16", 1e-3), ("powersgd", None)])
def test_torchs_hooks_run_as_they_are(hook: str, bound: float | None) -> None:
    first, second = on_team(hooked, 2, args=("lockstep", hook))
    assert all(map(torch.equal, first, second))
    if bound is not None:
        compare(second, on_team(hooked, 2, args=("torch", hook))[1], bound)


def stops_early(world: lockstep.World) -> str:
    ddp = lockstep.DistributedDataParallel(zoo.build("mlp"))
    with (
        pytest.raises(RuntimeError) as caught,
        ddp.join(throw_on_early_termination=True),
    ):
        train(ddp, world.rank, 2 + world.rank)
    return str(caught.value)


def test_join_can_stop_all_ranks_with_the_first() -> None:
    first, second = on_team(stops_early, 2)
    assert first == "Rank 0 exhausted all inputs."
    assert "exhausted inputs" in second


def statistics(world: lockstep.World) -> tuple[Tensor, Tensor, int]:
    model = zoo.build("cnn")
    ddp = lockstep.DistributedDataParallel(model, forward_sync_buffers=False)
    ddp(zoo.batch(world.rank, 0)[0])
    local = model.norm.running_mean.clone()
    ddp.sync_buffers()
    return local, model.norm.running_mean.clone(), int(model.norm.num_batches_tracked)


def test_without_forward_sync_buffers_statistics_stay_local_until_they_are_averaged() -> None:
    ranks = on_team(statistics, 3)
    mean = torch.stack([local for local, _, _ in ranks]).mean(0)
    for local, after, batches in ranks:
        assert not torch.equal(local, after)
        torch.testing.assert_close(after, mean)
        assert batches == 1


PAIRS = {"process group": ((0, 1), (2, 3)), "stepper": ((0, 1), (2, 3)), "mesh": ((0, 2), (1, 3))}


def in_pairs(world: lockstep.World) -> dict[str, list[Tensor]]:
    """Gradients of wrappers, and the weights after a Stepper's step around one, where each pair of
    ranks averages among itself.
    """
    x, y = zoo.batch(world.rank)
    group = [dist.new_group(list(pair)) for pair in PAIRS["process group"]][world.rank // 2]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "other"))
    results = {}
    for name, options in (
        ("process group", {"process_group": group}),
        ("mesh", {"device_mesh": mesh["data"]}),
    ):
        ddp = lockstep.DistributedDataParallel(zoo.build("mlp"), **options)
        zoo.loss_sum(ddp(x), y).backward()
        results[name] = gradients(ddp)
    with refused("mesh-of-several-axes", axes=["data", "other"]):
        lockstep.DistributedDataParallel(zoo.build("mlp"), device_mesh=mesh)
    ddp = lockstep.DistributedDataParallel(zoo.build("mlp"), process_group=group)
    stepper = lockstep.Stepper(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1))
    for u, v in stepper.micro_batches([(x, y)]):
        stepper.backward(zoo.loss_sum(ddp(u), v), weight=4)
    assert stepper.step().weight == 8
    return results | {"stepper": zoo.weights(ddp)}


def test_wrappers_and_steppers_of_some_ranks_average_among_them() -> None:
    ranks = on_team(in_pairs, 4)
    for name, pairs in PAIRS.items():
        for pair in pairs:
            model = zoo.build("mlp")
            expected = mean_gradients(model, map(zoo.batch, pair))
            if name == "stepper":  # the mean over eight samples, in place of two batches
                expected = [
                    parameter.detach() - 0.1 * gradient / 4
                    for parameter, gradient in zip(model.parameters(), expected, strict=True)
                ]
            for rank in pair:
                compare(ranks[rank][name], expected)


def ignoring(world: lockstep.World) -> tuple[Tensor, Tensor]:
    model = zoo.build("mlp")
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
        model, ["0.weight"]
    )
    if world.rank:
        with torch.no_grad():
            model[0].weight += 1
    ddp = lockstep.DistributedDataParallel(model)
    x, y = zoo.batch(world.rank, 0)
    zoo.loss_sum(ddp(x), y).backward()
    return model[0].weight.detach().clone(), model[0].weight.grad.clone()


def test_ignored_parameters_are_left_alone() -> None:
    (first, first_gradient), (second, second_gradient) = on_team(ignoring, 2)
    assert torch.equal(first + 1, second)
    assert not torch.equal(first_gradient, second_gradient)


def test_what_cannot_be_meant_is_refused() -> None:
    cases: tuple[tuple[str, object, str], ...] = (
        ("device_ids", [0], "not-the-modules-device"),
        ("output_device", 0, "not-the-modules-device"),
        ("clip", 1.0, "needs-a-stepper"),
        ("exact", True, "needs-a-stepper"),
        ("update", "sharded", "needs-a-stepper"),
        ("mixed_precision", object(), "keyword-without-meaning"),
        ("dim", 1, "keyword-without-meaning"),
        ("checks", "none", "unknown-choice"),
    )
    with lockstep.init():
        for name, value, code in cases:
            with refused(code, name=name, value=value):
                lockstep.DistributedDataParallel(zoo.build("mlp"), **{name: value})  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="unexpected keyword 'buket_cap_mb'"):
            lockstep.DistributedDataParallel(zoo.build("mlp"), buket_cap_mb=5)
        ddp = lockstep.DistributedDataParallel(Outputs())
        at = {"argument": "argument 0['x'][1]", "device": "meta"}
        with refused("input-on-another-device", **at, module="cpu (rank 0, local rank 0)"):
            ddp({"x": [torch.zeros(1), torch.zeros(1, device="meta")]})


def skips_a_backward(world: World) -> None:
    model = lockstep.DistributedDataParallel(zoo.build("mlp"), world=world)
    for step in range(9):
        x, y = zoo.batch(world.rank)
        loss = zoo.loss_sum(model(x), y)
        if step != 4 or world.rank == 0:
            loss.backward()


def test_a_backward_that_one_rank_skips_is_named_at_the_next_one() -> None:
    with pytest.raises(WorkerFailed, match=r"bucket 0 of forward 5 .* bucket 0 of forward 6 "):
        run_ranks(skips_a_backward, 2)
