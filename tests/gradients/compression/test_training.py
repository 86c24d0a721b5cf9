"""Training with compressed gradients: idle ranks, a sharded update, skipped steps, checkpoints,
and what is refused.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import lockstep
from lockstep.errors import LockstepWarning
from lockstep.testing import run_ranks
from tests.gradients.compression.summing import EVERY, OWING
from tests.refused import refused


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(128, 40),
        nn.Tanh(),
        nn.Linear(40, 4),
    ).to(memory_format=torch.channels_last)


def images() -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(84, 1, 6, 6, generator=generator)
    return TensorDataset(x, x.flatten(1)[:, :4].argmax(1))


class Run:
    """`micro_batch` 4: a full window has `global_batch / 4` slots, the last of an epoch fewer."""

    def __init__(
        self,
        world: lockstep.World,
        compress: str,
        *,
        global_batch: int = 16,
        update: str = "replicated",
    ) -> None:
        self.world = world
        self.model = net()
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self.stepper = lockstep.Stepper(
            self.model,
            optimizer,
            compress=compress,
            update=update,
            bucket_mb=2**-11,
            clip=5.0,
            world=world,
        )
        self.loader = lockstep.Loader(images(), global_batch=global_batch, micro_batch=4, seed=3)

    def train(
        self, epochs: int, checkpoints: lockstep.Checkpoints | None = None, stop: int | None = None
    ) -> list[float]:
        losses = []
        for epoch in self.loader.epochs(epochs):
            for window in epoch:
                for x, y in self.stepper.micro_batches(window):
                    self.stepper.backward(
                        F.cross_entropy(self.model(x), y, reduction="sum"), weight=len(y)
                    )
                losses.append(self.stepper.step().loss)
                if self.stepper.steps == stop:
                    if checkpoints is not None:
                        checkpoints.save()
                    return losses
        return losses

    def weights(self) -> list[Tensor]:
        return [value.clone() for value in self.model.state_dict().values()]

    def owed(self) -> dict[str, Tensor]:
        (keeper,) = (
            each for each in self.stepper.keepers() if "compression" in type(each).__module__
        )
        return {name: value.clone() for name, value in keeper.kept()[1].items()}


def trained(
    world: lockstep.World, compress: str, options: dict[str, Any]
) -> tuple[list[float], list[Tensor]]:
    run = Run(world, compress, **options)
    assert len(run.stepper.reducer.buckets) > 2
    losses = run.train(6)
    return losses, run.weights()


def trained_in_every_way(world: lockstep.World) -> dict[str, tuple[list[float], list[Tensor]]]:
    return {compress: trained(world, compress, {}) for compress in EVERY}


@cache
def every(workers: int) -> list[dict[str, tuple[list[float], list[Tensor]]]]:
    """Ranks start once for all ways to compress."""
    return run_ranks(trained_in_every_way, workers)


@pytest.mark.parametrize("compress", EVERY)
@pytest.mark.parametrize("workers", [1, 2, 5])
def test_it_learns_with_the_same_weights_on_all_ranks(compress: str, workers: int) -> None:
    """5 ranks and 4 micro-batches: one rank is idle, and in the short step that ends an epoch
    four are.
    """
    found = [ranks[compress] for ranks in every(workers)]
    for _, weights in found[1:]:
        assert all(map(torch.equal, weights, found[0][1]))
    losses = found[0][0]
    assert sum(losses[-5:]) < 0.6 * sum(losses[:5])


@pytest.mark.parametrize("compress", ["bf16", "int8", "powersgd:2"])
def test_a_sharded_update_has_the_replicated_ones_bits(compress: str) -> None:
    one = [ranks[compress] for ranks in every(2)]
    other = run_ranks(trained, 2, args=(compress, {"update": "sharded"}))
    for (losses, weights), (theirs, their_weights) in zip(one, other, strict=True):
        assert losses == theirs
        assert all(map(torch.equal, weights, their_weights))


Told = tuple[list[float], list[Tensor], dict[str, Tensor]]


def undisturbed(world: lockstep.World, compress: str) -> Told:
    run = Run(world, compress)
    losses = run.train(2)
    return losses, run.weights(), run.owed()


def begun(world: lockstep.World, compress: str, folder: str) -> dict[str, Tensor]:
    run = Run(world, compress)
    checkpoints = lockstep.Checkpoints(folder, run.stepper, run.loader)
    run.train(2, checkpoints, stop=4)
    checkpoints.close()
    return run.owed()


def whole_and_begun(
    world: lockstep.World, compress: str, folder: str
) -> tuple[Told, dict[str, Tensor]]:
    return undisturbed(world, compress), begun(world, compress, folder)


def gone_on(world: lockstep.World, compress: str, folder: str) -> tuple[dict[str, Tensor], Told]:
    """What is owed when it goes on, and what becomes of it."""
    run = Run(world, compress)
    assert lockstep.Checkpoints(folder, run.stepper, run.loader).resume() is not None
    before = run.owed()
    return before, (run.train(2), run.weights(), run.owed())


@pytest.mark.parametrize("compress", OWING)
def test_a_resumed_training_is_the_one_that_was_not_stopped(compress: str, tmp_path: Path) -> None:
    whole, left = zip(*run_ranks(whole_and_begun, 2, args=(compress, str(tmp_path))), strict=True)
    for rank, (before, (losses, weights, owed)) in enumerate(
        run_ranks(gone_on, 2, args=(compress, str(tmp_path)))
    ):
        assert before.keys() == left[rank].keys()
        assert all(torch.equal(before[name], left[rank][name]) for name in before)
        assert losses == whole[rank][0][4:]
        assert all(map(torch.equal, weights, whole[rank][1]))
        assert all(torch.equal(owed[name], whole[rank][2][name]) for name in owed)


@pytest.mark.parametrize(("then", "now"), [(3, 2), (3, 1), (2, 3)])
def test_at_another_number_of_ranks_nothing_that_is_owed_is_lost(
    then: int, now: int, tmp_path: Path
) -> None:
    left = run_ranks(begun, then, args=("int8", str(tmp_path)))
    found = run_ranks(gone_on, now, args=("int8", str(tmp_path)))
    for name in left[0]:
        for rank, (before, _) in enumerate(found):
            expected = sum(
                (left[each][name] for each in range(rank, then, now)),
                torch.zeros_like(before[name]),
            )
            assert torch.equal(before[name], expected)
    for _, (losses, weights, _) in found:
        assert len(losses) == 8
        assert all(map(torch.equal, weights, found[0][1][1]))


def skipped(
    world: lockstep.World, compress: str
) -> tuple[bool, dict[str, Tensor], dict[str, Tensor], list[Tensor]]:
    run = Run(world, compress)
    run.train(1, stop=3)
    before = run.owed()
    x, y = next(iter(torch.utils.data.DataLoader(images(), batch_size=4)))
    for each in run.stepper.micro_batches([x]):
        run.stepper.backward(
            F.cross_entropy(run.model(each), y, reduction="sum")
            * (torch.nan if world.rank == 1 else 1.0),
            weight=4,
        )
    with pytest.warns(LockstepWarning, match="was skipped") if world.rank == 0 else torch.no_grad():
        applied = run.stepper.step().applied
    between = run.owed()
    for each in run.stepper.micro_batches([x]):
        run.stepper.backward(F.cross_entropy(run.model(each), y, reduction="sum"), weight=4)
    assert run.stepper.step().applied
    return applied, before, between, run.weights()


@pytest.mark.parametrize("compress", OWING)
def test_a_skipped_step_leaves_what_is_owed_and_training_goes_on(compress: str) -> None:
    found = run_ranks(skipped, 2, args=(compress,))
    for applied, before, between, weights in found:
        assert not applied
        assert all(torch.equal(before[name], between[name]) for name in before)
        assert all(each.isfinite().all() for each in weights)
        assert all(map(torch.equal, weights, found[0][3]))


def of_layers_that_come_and_go(world: lockstep.World) -> list[set[str]]:
    run = Run(world, "int8")
    found = []
    run.train(1, stop=2)
    found.append(set(run.owed()))
    first = run.owed()["error/6.weight"]
    run.model[0].requires_grad_(False)
    run.stepper.reducer.reset()
    found.append(set(run.owed()))
    assert torch.equal(run.owed()["error/6.weight"], first)
    return found


def test_a_frozen_layer_is_owed_nothing_and_others_keep_theirs() -> None:
    all_of_them, fewer = run_ranks(of_layers_that_come_and_go, 2)[0]
    assert {name.removeprefix("error/") for name in all_of_them} == {
        name for name, _ in net().named_parameters()
    }
    assert all_of_them - fewer == {"error/0.weight", "error/0.bias"}


def stepper_for(model: nn.Module, **options: Any) -> lockstep.Stepper:
    return lockstep.Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1), **options)


def test_a_rank_above_every_matrix_is_refused_and_one_that_pays_nowhere_is_warned_of() -> None:
    model = nn.Sequential(nn.Linear(20, 8), nn.Linear(8, 16))
    with lockstep.init(backend="gloo"):
        with refused(
            "powersgd-rank-too-large", compress="powersgd:9", columns=9, parameter="0.weight"
        ):
            stepper_for(model, compress="powersgd:9")
        with pytest.warns(LockstepWarning, match="makes no gradient of this model smaller"):
            stepper_for(model, compress="powersgd:8")
        with refused("powersgd-without-matrix", compress="powersgd:1"):
            stepper_for(nn.LayerNorm(8), compress="powersgd:1")
        assert stepper_for(model, compress="powersgd:2").reducer.reduction.name == "powersgd:2"


def test_a_loss_scaler_and_a_wrapped_model_are_refused() -> None:
    with lockstep.init(backend="gloo"):
        scaler = torch.amp.GradScaler("cpu")
        with refused("loss-scaler-does-not-fit", option="compress='int8'"):
            stepper_for(net(), compress="int8", scaler=scaler)
        assert stepper_for(net(), compress="fp16", scaler=scaler).reducer.reduction.name == "fp16"
        with refused("needs-bare-module", option="compress='bf16'"):
            stepper_for(lockstep.DistributedDataParallel(net()), compress="bf16")


def test_a_complex_parameter_is_named() -> None:
    model = net()
    model[4].weight = nn.Parameter(torch.zeros(40, 128, dtype=torch.complex64))
    with (
        lockstep.init(backend="gloo"),
        refused("compress-not-floats", compress="bf16", parameter="4.weight", dtype="complex64"),
    ):
        stepper_for(model, compress="bf16")
