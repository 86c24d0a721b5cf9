"""Edges of training a split model: tied and frozen weights, short last windows, idle ranks,
other schedules and updates, bf16, layers named by the task.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lockstep
from lockstep.config.mesh import Mesh
from lockstep.config.parts import Parts
from lockstep.errors import ReplicaDivergence, WorkerFailed
from lockstep.gradients import reductions
from lockstep.testing import run_ranks
from lockstep.training.train import train

WIDTH = 8


class Tied(nn.Module):
    """The embedding is the output layer as well: the first and the last stage hold it."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = nn.Embedding(16, WIDTH)
        self.blocks = nn.Sequential(
            *[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)]
        )
        self.head = nn.Linear(WIDTH, 16, bias=False)
        self.head.weight = self.bytes.weight

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.blocks(self.bytes(x)))
        return found


class Frozen(Tied):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, 16, bias=False)
        self.blocks[1].requires_grad_(False)


class Branching(nn.Module):
    """Its forward asks a tensor: it cannot be followed."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Embedding(16, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.third = nn.Linear(WIDTH, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(self.first(x))
        if y.sum() > 1e9:
            y = y * 2
        found: Tensor = self.third(y)
        return found


def parts_of(model: nn.Module) -> list[nn.Module]:
    return [model.get_submodule(name) for name in ("first", "second", "third")]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)


def two_groups(model: nn.Module) -> torch.optim.Optimizer:
    """As many do: no weight decay for what has one dim. A stage may have nothing of one kind."""
    named = dict(model.named_parameters())
    flat = [each for each in named.values() if each.dim() < 2]
    deep = [each for each in named.values() if each.dim() >= 2]
    return torch.optim.AdamW(
        [{"params": deep, "weight_decay": 0.1}, {"params": flat, "weight_decay": 0.0}], lr=1e-2
    )


def loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    return nn.functional.cross_entropy(output.float(), batch[1], reduction="sum"), len(batch[1])


def task(model: Any, samples: int = 10, **changes: Any) -> lockstep.Task:
    """10 samples in steps of 8, micro-batches of 3: 3, 3, 2 of each, and at an epoch's end 2."""
    data = [
        (torch.tensor(number * 7 % 16), torch.tensor(number * 5 % 16)) for number in range(samples)
    ]
    fields = {
        "optimizer": sgd,
        "global_batch": 8,
        "micro_batch": 3,
        "epochs": 2,
        "clip": 1.0,
        "eval_data": data[:7],
        "name": "made",
    }
    return lockstep.Task(model=model, train_data=data, loss=loss, **(fields | changes))


def one(
    world: lockstep.World, made: Any, changes: dict[str, Any], options: dict[str, Any]
) -> tuple[list[float], dict[str, float], str]:
    losses: list[float] = []
    found = replace(
        task(made, **changes),
        on_step=lambda record: losses.append(record["loss"]),
        callbacks_on="all",
    )
    result = train(found, world=world, **options)
    return losses, result.metrics, result.sha256


def check(
    model: Any, mesh: str, changes: dict[str, Any], options: dict[str, Any], *, rel: float = 1e-4
) -> list[Any]:
    ranks = Mesh.read(mesh).size
    plain = {name: value for name, value in options.items() if name not in ("schedule", "update")}
    ((losses, metrics, _),) = run_ranks(one, 1, (model, changes, plain))
    found = run_ranks(one, ranks, (model, changes, {"mesh": mesh, **options}))
    for its_losses, its_metrics, _ in found:
        assert its_losses == pytest.approx(losses, rel=rel)
        assert its_metrics == pytest.approx(metrics, rel=rel)
    assert len({sha256 for _, _, sha256 in found}) == 1
    return found


@pytest.mark.parametrize("schedule", ["naive", "gpipe", "1f1b"])
def test_every_schedule_with_short_windows_and_uneven_micro_batches(schedule: str) -> None:
    check(Tied, "pipeline=2", {}, {"schedule": schedule})


@pytest.mark.parametrize("mesh", ["pipeline=2", "pipeline=3", "data=2,pipeline=2", "shard=3"])
def test_tied_weights(mesh: str) -> None:
    check(Tied, mesh, {}, {})


@pytest.mark.parametrize("mesh", ["pipeline=2", "data=3", "shard=2"])
def test_frozen_layers(mesh: str) -> None:
    check(Frozen, mesh, {}, {})


def test_a_stage_with_nothing_to_train_is_named() -> None:
    with pytest.raises(
        WorkerFailed,
        match=(
            r"mesh='pipeline=3': rank 1 \(data 0, shard 0, pipeline 1, tensor 0\)"
            r".*\[nothing-to-train-on-rank\]"
        ),
    ):
        run_ranks(
            one,
            3,
            (Frozen, {"parts": Parts(stages=["blocks.1.0", "blocks.2.0"])}, {"mesh": "pipeline=3"}),
        )


@pytest.mark.parametrize("mesh", ["shard=4", "data=2,shard=2"])
def test_ranks_without_a_micro_batch_take_part(mesh: str) -> None:
    """Steps of two micro-batches over four ranks; the last step of an epoch has one sample."""
    check(Tied, mesh, {"global_batch": 4, "micro_batch": 2, "samples": 9}, {})


@pytest.mark.parametrize(
    "changes",
    [{"optimizer": two_groups}, {"clip": 0.02}],
    ids=["AdamW in two groups", "SGD, clipped in every step"],
)
def test_the_sharded_update_on_a_pipeline(changes: dict[str, Any]) -> None:
    check(wide, "data=2,pipeline=2", changes, {"update": "sharded"})


def wide() -> nn.Module:
    """Shards are cut at multiples of 1024 elements: every rank has some of each stage."""
    return nn.Sequential(
        nn.Embedding(16, 64), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Linear(64, 16)
    )


@pytest.mark.parametrize("mesh", ["pipeline=2", "shard=2"])
def test_groups_of_parameters(mesh: str) -> None:
    check(Frozen, mesh, {"optimizer": two_groups}, {})


@pytest.mark.parametrize("mesh", ["pipeline=2", "shard=2"])
def test_bf16(mesh: str) -> None:
    check(Tied, mesh, {}, {"precision": "bf16"}, rel=3e-2)


def dropping() -> nn.Module:
    """Works in place, and drops: in training only."""
    blocks = [
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True), nn.Dropout(0.5))
        for _ in range(4)
    ]
    return nn.Sequential(nn.Embedding(16, WIDTH), *blocks, nn.Linear(WIDTH, 16))


def zero_rate(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-12)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_dropout_is_off_in_evaluation(schedule: str) -> None:
    """With a rate of next to nothing the weights stay, and the evaluation is one process's."""
    ((_, metrics, _),) = run_ranks(one, 1, (dropping, {"optimizer": zero_rate}, {}))
    for _, its_metrics, _ in run_ranks(
        one, 2, (dropping, {"optimizer": zero_rate}, {"mesh": "pipeline=2", "schedule": schedule})
    ):
        assert its_metrics == pytest.approx(metrics, rel=1e-5)


def test_layers_named_by_the_task() -> None:
    check(Branching, "pipeline=3", {"parts": Parts(layers=parts_of)}, {})


def test_tensor_parts_of_a_model_of_two_layers() -> None:
    check(pair, "tensor=2", {"parts": Parts(tensor={"1": "colwise", "3": "rowwise"})}, {})
    check(pair, "data=2,tensor=4", {"parts": Parts(tensor={"1": "colwise", "3": "rowwise"})}, {})


def summed_in_two_ways(
    world: lockstep.World, *given: Any
) -> tuple[list[float], dict[str, float], str]:
    """One group along the data axis finds that the backend sums fastest, the other that memory
    does, as on a busy host.
    """
    reductions._is_quicker = lambda candidate, native, group: group.ranks[0] == 0
    return one(world, *given)


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ("data=2,tensor=2", {}),
        ("data=2,pipeline=2", {"update": "sharded"}),
    ],
)
def test_a_norm_over_parts_that_are_summed_in_different_ways(
    mesh: str, options: dict[str, Any]
) -> None:
    changes = {
        "parts": Parts(tensor={"1": "colwise", "3": "rowwise"} if "tensor" in mesh else {}),
        "clip": 0.02,
    }
    ((losses, metrics, _),) = run_ranks(one, 1, (pair, changes, {}))
    for its_losses, its_metrics, _ in run_ranks(
        summed_in_two_ways, 4, (pair, changes, {"mesh": mesh, **options})
    ):
        assert its_losses == pytest.approx(losses, rel=1e-4)
        assert its_metrics == pytest.approx(metrics, rel=1e-4)


def pair() -> nn.Module:
    return nn.Sequential(
        nn.Embedding(16, WIDTH),
        nn.Linear(WIDTH, 12),
        nn.GELU(),
        nn.Linear(12, WIDTH),
        nn.Linear(WIDTH, 16),
    )


def drifting(world: lockstep.World, mesh: str) -> None:
    """On rank 3 a weight that all tensor ranks hold whole is scaled after each update."""

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        found = sgd(model)

        def drift(*_: object) -> None:
            if world.rank == 3:
                with torch.no_grad():
                    model.get_parameter("0.weight").mul_(1.001)

        found.register_step_post_hook(drift)
        return found

    changes = {
        "parts": Parts(tensor={"1": "colwise", "3": "rowwise"}),
        "optimizer": optimizer,
    }
    train(task(pair, **changes), world=world, mesh=mesh)


def weight_between() -> nn.Module:
    return nn.Sequential(
        nn.Embedding(16, WIDTH),
        nn.Linear(WIDTH, 2 * WIDTH),
        nn.PReLU(),
        nn.Linear(2 * WIDTH, 16),
    )


def partial_gradients(world: lockstep.World) -> None:
    """The PReLU's one weight gets a gradient from this rank's features only."""
    parts = Parts(tensor={"1": "colwise", "3": "rowwise"})
    train(task(weight_between, parts=parts), world=world, mesh="tensor=2")


def divergence(world: lockstep.World, fn: Any, *args: Any) -> tuple[str, str, tuple[int, ...]]:
    with pytest.raises(ReplicaDivergence) as found:
        fn(world, *args)
    return found.value.code, found.value.parameter, found.value.ranks


def test_what_tensor_ranks_share_must_stay_equal() -> None:
    assert (
        run_ranks(divergence, 4, (drifting, "tensor=4"))
        == [("replicas-differ", "0.weight", (3,))] * 4
    )
    assert (
        run_ranks(divergence, 2, (partial_gradients,))
        == [("replicas-differ", "2.weight", (1,))] * 2
    )


def test_ranks_are_named_by_their_numbers_in_the_world() -> None:
    with pytest.raises(WorkerFailed) as failed:
        run_ranks(drifting, 4, ("data=2,tensor=2",))
    assert failed.value.rank in (1, 3)  # along the data axis first
    assert "[replicas-differ]" in str(failed.value)
    assert "between rank 1 and rank 3" in str(failed.value)
