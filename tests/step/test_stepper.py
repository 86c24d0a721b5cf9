"""The Stepper's own rules: where backward and step belong, weights of 0, means, idle ranks,
buffers, what a step reports.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterable, Iterator
from contextlib import nullcontext, suppress
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep.errors import LockstepWarning, WorkerFailed
from lockstep.runtime import randomness
from lockstep.testing import run_ranks
from lockstep.updates.update import Applied
from tests import zoo
from tests.refused import refused


@pytest.fixture
def world():  # type: ignore[no-untyped-def]
    with lockstep.init() as world:
        yield world


def stepper_for(model: nn.Module, lr: float = 0.1, **options: object) -> lockstep.Stepper:
    return lockstep.Stepper(model, torch.optim.SGD(model.parameters(), lr=lr), **options)  # type: ignore[arg-type]


def window(count: int = 2, size: int = 4) -> list[tuple[Tensor, Tensor]]:
    x, y = zoo.samples(count * size)
    return list(zip(x.split(size), y.split(size), strict=True))


def test_backward_outside_the_loop_is_refused(world: lockstep.World) -> None:
    model = zoo.build("mlp")
    stepper = stepper_for(model)
    with refused("backward-outside-window"):
        stepper.backward(model(torch.zeros(1, 6)).sum(), weight=1)


def test_step_without_a_window_or_inside_the_loop_is_refused(world: lockstep.World) -> None:
    model = zoo.build("mlp")
    stepper = stepper_for(model)
    with refused("step-without-window"):
        stepper.step()
    for x, _ in stepper.micro_batches(window()):
        stepper.backward(model(x).sum(), weight=4)
        with refused("step-inside-window"):
            stepper.step()


def test_a_loop_that_breaks_off_steps_with_what_it_had(world: lockstep.World) -> None:
    model = zoo.build("mlp")
    stepper = stepper_for(model)
    for x, y in stepper.micro_batches(window(3)):
        stepper.backward(zoo.loss_sum(model(x), y), weight=4)
        break
    assert stepper.step().weight == 4


def test_two_windows_without_a_step_between_are_refused(world: lockstep.World) -> None:
    model = zoo.build("mlp")
    stepper = stepper_for(model)
    for x, y in stepper.micro_batches(window()):
        stepper.backward(zoo.loss_sum(model(x), y), weight=4)
    with refused("window-still-open"):
        next(stepper.micro_batches(window()))


def test_one_backward_a_micro_batch(world: lockstep.World) -> None:
    model = zoo.build("mlp")
    stepper = stepper_for(model)
    for x, y in stepper.micro_batches(window()):
        stepper.backward(zoo.loss_sum(model(x), y), weight=4)
        loss = zoo.loss_sum(model(x), y)
        with refused("second-backward"):
            stepper.backward(loss, weight=4)


class OutOfMemory(Exception):
    pass


def failing_loss(model: nn.Sequential, x: Tensor, y: Tensor) -> Tensor:
    """A loss whose backward fails after the last layer's gradients, before those of the first."""

    def fail(gradient: Tensor) -> None:
        raise OutOfMemory

    hidden = model[:-1](x)
    hidden.register_hook(fail)
    return zoo.loss_sum(model[-1](hidden), y)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("failing", [0, 1])  # the last backward has sent the weights before
def test_no_step_follows_a_backward_that_an_exception_ended(
    world: lockstep.World, failing: int, exact: bool
) -> None:
    model = zoo.build("mlp")
    before = [parameter.detach().clone() for parameter in model.parameters()]
    stepper = stepper_for(model, exact=exact)
    loader = lockstep.Loader(TensorDataset(*zoo.samples(8)), global_batch=8, micro_batch=4)
    for epoch in loader.epochs(1):
        for number, (x, y) in enumerate(stepper.micro_batches(next(iter(epoch)))):
            if number == failing:
                with pytest.raises(OutOfMemory):
                    stepper.backward(failing_loss(model, x, y), weight=4)
                with refused("backward-interrupted"):  # a second try in smaller parts
                    stepper.backward(zoo.loss_sum(model(x[:2]), y[:2]), weight=2)
            elif number < failing:
                stepper.backward(zoo.loss_sum(model(x), y), weight=4)
        break
    with refused("backward-interrupted"):
        stepper.step()
    assert all(map(torch.equal, before, model.parameters()))


def catching(world: lockstep.World) -> None:
    model = zoo.build("mlp")
    stepper = stepper_for(model)
    x, y = window(1, 4 + world.rank)[0]
    for _ in stepper.micro_batches([(x, y)]):
        loss = failing_loss(model, x, y) if world.rank == 1 else zoo.loss_sum(model(x), y)
        with suppress(OutOfMemory):
            stepper.backward(loss, weight=len(x))
    stepper.step()


def test_a_rank_that_caught_an_exception_of_its_backward_ends_the_step_of_all() -> None:
    with pytest.raises(WorkerFailed, match=r"rank 1 .*\[backward-interrupted\]"):
        run_ranks(catching, 2)


def test_a_micro_batch_that_is_left_out_before_its_backward_does_not_count(
    world: lockstep.World,
) -> None:
    model, alone = zoo.build("mlp"), zoo.build("mlp")
    stepper = stepper_for(model)
    batches = window(3)
    for number, (x, y) in enumerate(stepper.micro_batches(batches)):
        out = model(x)
        if number != 1:
            stepper.backward(zoo.loss_sum(out, y), weight=4)
    result = stepper.step()
    loss = sum(zoo.loss_sum(alone(x), y) for x, y in (batches[0], batches[2])) / 8
    loss.backward()
    assert (result.weight, result.loss) == (8, pytest.approx(loss.item()))
    for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        assert zoo.distance(ours.grad, theirs.grad) < 1e-6


def test_a_gradient_that_is_added_after_its_bucket_has_left_is_named(world: lockstep.World) -> None:
    model = zoo.build("mlp")
    stepper = stepper_for(model)
    for x, y in stepper.micro_batches(window(count=1)):
        stepper.backward(zoo.loss_sum(model(x), y), weight=4)
        zoo.loss_sum(model(x), y).backward()
    with refused("gradient-cleared") as caught:
        stepper.step()
    assert re.fullmatch(r"\d\.(weight|bias)", caught.value.values["parameter"])


@pytest.mark.parametrize("weight", [-1.0, math.inf, math.nan])
def test_weights_are_counts(world: lockstep.World, weight: float) -> None:
    model = zoo.build("mlp")
    stepper = stepper_for(model)
    for x, y in stepper.micro_batches(window()):
        loss = zoo.loss_sum(model(x), y)
        with refused("wrong-value", name="weight", value=weight):
            stepper.backward(loss, weight=weight)


def test_a_loss_of_many_numbers_and_an_unknown_reduction_are_refused(world: lockstep.World) -> None:
    model = zoo.build("mlp")
    stepper = stepper_for(model)
    for x, y in stepper.micro_batches(window()):
        with refused("loss-not-one-number", what="the loss", shape=[4, 3]):
            stepper.backward(model(x), weight=4)
        with refused("unknown-choice", name="reduction", value="avg", choices=("sum", "mean")):
            stepper.backward(zoo.loss_sum(model(x), y), weight=4, reduction="avg")  # type: ignore[arg-type]


def test_an_optimizer_over_another_models_parameters_is_refused(world: lockstep.World) -> None:
    with refused("optimizer-of-another-model", group=0, shape=[32, 6]):
        lockstep.Stepper(zoo.build("mlp"), torch.optim.SGD(zoo.build("mlp").parameters(), lr=0.1))


def test_sparse_gradients_become_dense_ones_which_is_said_and_sparse_adam_is_refused(
    world: lockstep.World,
) -> None:
    model = nn.Embedding(9, 3, sparse=True)
    with refused("optimizer-needs-sparse-gradients"):
        lockstep.Stepper(model, torch.optim.SparseAdam(model.parameters()))
    stepper = lockstep.Stepper(model, torch.optim.SGD(model.parameters(), lr=1.0))
    before = model.weight.detach().clone()
    for rows in stepper.micro_batches([torch.tensor([1, 2, 2])]):
        with pytest.warns(LockstepWarning, match="the gradient of 'weight' is sparse"):
            stepper.backward(model(rows).sum(), weight=1)
    stepper.step()
    assert (before - model.weight)[:, 0].tolist() == pytest.approx(
        [0, 1, 2, 0, 0, 0, 0, 0, 0], abs=1e-6
    )


def test_an_optimizer_that_needs_a_closure_and_a_model_without_shapes_are_refused_by_name(
    world: lockstep.World,
) -> None:
    model = zoo.build("mlp")
    with refused("optimizer-needs-closure", optimizer="LBFGS"):
        lockstep.Stepper(model, torch.optim.LBFGS(model.parameters()))
    with_scheduler = torch.optim.AdamW(model.parameters())
    torch.optim.lr_scheduler.LambdaLR(with_scheduler, lambda step: 1.0)
    lockstep.Stepper(model, with_scheduler)
    lazy = nn.Sequential(nn.Linear(6, 4), nn.LazyLinear(3))
    with refused("lazy-parameter", parameter="1.weight"):
        stepper_for(lazy)
    lazy(torch.zeros(1, 6))
    stepper_for(lazy)


def test_a_second_stepper_takes_the_model_over_and_the_first_says_so(world: lockstep.World) -> None:
    model = zoo.build("mlp")
    first, second = stepper_for(model), stepper_for(model)
    for x, y in second.micro_batches(window()):
        second.backward(zoo.loss_sum(model(x), y), weight=4)
    assert second.step().applied
    with refused("parameters-taken-over"):
        next(first.micro_batches(window()))


def test_nothing_to_train_is_refused(world: lockstep.World) -> None:
    model = zoo.build("mlp").requires_grad_(False)
    with refused("no-trainable-parameter"):
        stepper_for(model)


@pytest.mark.parametrize("clip", [0, -1.0, math.nan])
def test_a_clip_of_nothing_is_refused(world: lockstep.World, clip: float) -> None:
    with refused("wrong-value", name="clip", value=clip):
        stepper_for(zoo.build("mlp"), clip=clip)


def test_buckets_are_as_large_as_asked_for(world: lockstep.World) -> None:
    model = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(8)])  # 16 KiB each
    sizes = {}
    for bucket_mb in (None, 2**-6, 2**-5):
        stepper = lockstep.Stepper(
            model, torch.optim.SGD(model.parameters(), lr=0.1), bucket_mb=bucket_mb
        )
        sizes[bucket_mb] = len(stepper.reducer.buckets)
    assert sizes == {None: 1, 2**-6: 8, 2**-5: 4}
    with refused("wrong-value", name="bucket_mb", value=0):
        lockstep.Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1), bucket_mb=0)
    wrapped = lockstep.DistributedDataParallel(model)
    with refused("set-on-the-wrapper", name="bucket_mb", value=5, keyword="bucket_cap_mb"):
        lockstep.Stepper(wrapped, torch.optim.SGD(model.parameters(), lr=0.1), bucket_mb=5)


def test_gradients_are_views_of_the_buckets_and_no_second_copy(world: lockstep.World) -> None:
    model = zoo.build("mlp")
    stepper = stepper_for(model)
    for _ in range(2):
        for x, y in stepper.micro_batches(window()):
            stepper.backward(zoo.loss_sum(model(x), y), weight=4)
        stepper.step()
        memory = {bucket.sum.untyped_storage().data_ptr() for bucket in stepper.reducer.buckets}
        assert {
            parameter.grad.untyped_storage().data_ptr()
            for parameter in model.parameters()
            if parameter.grad is not None
        } <= memory
    assert (
        stepper.reducer.layout.bytes
        <= sum(-(-parameter.numel() // 64) * 64 * 4 for parameter in model.parameters()) + 64 * 4
    )


def test_channels_last_gradients_keep_their_strides(world: lockstep.World) -> None:
    model = zoo.build("cnn").to(memory_format=torch.channels_last)
    stepper = stepper_for(model)
    for x, y in stepper.micro_batches(window()):
        stepper.backward(zoo.loss_sum(model(x), y), weight=4)
    stepper.step()
    for parameter in model.parameters():
        assert parameter.grad is not None
        assert parameter.grad.stride() == parameter.stride()


def test_a_plain_list_and_a_mean_that_is_said_to_be_one(world: lockstep.World) -> None:
    found = []
    for reduction in ("sum", "mean"):
        model = zoo.build("mlp")
        stepper = stepper_for(model)
        for x, y in stepper.micro_batches(window()):
            stepper.backward(
                torch.nn.functional.cross_entropy(model(x), y, reduction=reduction),
                weight=len(y),
                reduction=reduction,
            )  # type: ignore[arg-type]
        found.append(
            (stepper.step().loss, [parameter.detach().clone() for parameter in model.parameters()])
        )
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-6)
    for a, b in zip(found[0][1], found[1][1], strict=True):
        assert zoo.distance(a, b) < 1e-6


def test_a_mean_over_nothing_brings_no_nan(world: lockstep.World) -> None:
    model = zoo.build("mlp")
    stepper = stepper_for(model)
    batches = window(3)
    for place, (x, y) in enumerate(stepper.micro_batches(batches)):
        ignored = torch.full_like(y, -100) if place != 1 else y
        stepper.backward(
            torch.nn.functional.cross_entropy(model(x), ignored),
            weight=int((ignored >= 0).sum()),
            reduction="mean",
        )
    result = stepper.step()
    assert result.weight == 4
    assert math.isfinite(result.loss)
    assert all(parameter.isfinite().all() for parameter in model.parameters())


def test_a_window_of_weight_0_is_skipped_and_says_so(world: lockstep.World) -> None:
    model = zoo.build("cnn")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    stepper = stepper_for(model)
    for x, y in stepper.micro_batches(window()):
        stepper.backward(zoo.loss_sum(model(x), y) * 0, weight=0)
    with pytest.warns(
        LockstepWarning, match="step 1 was skipped: every rank's weight is 0"
    ) as said:
        result = stepper.step()
    assert said[0].filename == __file__
    assert (result.applied, result.weight) == (False, 0.0)
    assert result.reason == "every rank's weight is 0: the window has no samples"
    assert math.isnan(result.loss)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_an_overflow_under_clip_is_skipped_with_the_norm(world: lockstep.World) -> None:
    model = zoo.build("mlp")
    stepper = stepper_for(model, clip=1.0)
    for x, _ in stepper.micro_batches(window()):
        output = model(x)
        # 0, with a slope of nan
        stepper.backward(torch.sqrt((output - output.detach()).square().sum()), weight=4)
    with pytest.warns(LockstepWarning, match="the gradient's norm is"):
        result = stepper.step()
    assert not result.applied
    assert result.reason is not None
    assert result.reason.startswith("the gradient's norm is")


@pytest.mark.parametrize("bad", [False, True])
def test_what_only_the_device_knows_is_read_when_somebody_looks(
    world: lockstep.World, monkeypatch: pytest.MonkeyPatch, bad: bool
) -> None:
    model = zoo.build("mlp")
    before = [parameter.detach().clone() for parameter in model.parameters()]
    stepper = lockstep.Stepper(
        model, torch.optim.AdamW(model.parameters(), lr=0.1, fused=True), clip=1.0
    )
    stepper._outcomes.known_at_once = False  # as on a GPU
    read: list[Applied] = []
    look = Applied._read
    monkeypatch.setattr(Applied, "_read", lambda self: (read.append(self), look(self))[1])
    for x, _ in stepper.micro_batches(window()):
        output = model(x)
        # 0, with a slope of nan
        slope = torch.sqrt((output - output.detach()).square().sum()) if bad else output.sum()
        stepper.backward(slope, weight=4)
    result = stepper.step()
    assert not read, "the host waited for the gradient"
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True)) == bad
    with (
        pytest.warns(LockstepWarning, match="step 1 was skipped: the gradient's norm is nan")
        if bad
        else nullcontext()
    ):
        for x, y in stepper.micro_batches(window()):
            stepper.backward(zoo.loss_sum(model(x), y), weight=4)
    assert result.applied != bad
    stepper.step()


def test_the_scheduler_follows_applied_steps_only(world: lockstep.World) -> None:
    model = zoo.build("mlp")
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    stepper = lockstep.Stepper(model, sgd, scheduler=torch.optim.lr_scheduler.StepLR(sgd, 1, 0.5))
    for weight in (4, 0, 4):
        for x, y in stepper.micro_batches(window()):
            stepper.backward(zoo.loss_sum(model(x), y) * (weight > 0), weight=weight)
        with pytest.warns(LockstepWarning) if weight == 0 else nullcontext():
            stepper.step()
    assert sgd.param_groups[0]["lr"] == 0.25


def test_a_loss_scaler_changes_nothing_but_the_range(world: lockstep.World) -> None:
    found = []
    for scaler in (None, torch.amp.GradScaler("cpu", init_scale=2.0**10)):
        model = zoo.build("mlp")
        stepper = stepper_for(model, scaler=scaler, clip=0.5)
        loader = lockstep.Loader(
            TensorDataset(*zoo.samples(24)), global_batch=12, micro_batch=4, shuffle=False
        )
        for epoch in loader.epochs(1):
            for batches in epoch:
                for x, y in stepper.micro_batches(batches):
                    stepper.backward(zoo.loss_sum(model(x), y), weight=len(y))
                result = stepper.step()
        found.append(
            (result.norm, [parameter.detach().clone() for parameter in model.parameters()])
        )
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-5)
    for a, b in zip(found[0][1], found[1][1], strict=True):
        assert zoo.distance(a, b) < 1e-6


class InHalf(nn.Module):
    """Computes in fp16, where a sum over many samples overflows and their mean does not."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(
            x.half(), self.linear.weight.half(), self.linear.bias.half()
        ).float()


def in_half(
    world: lockstep.World, scale: float, share: list[list[int]]
) -> tuple[list[float], list[Tensor]]:
    """Three steps over plain lists of micro-batches; `share`: which of them each rank has."""
    torch.manual_seed(7)
    model = InHalf()
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    stepper = stepper_for(model, scaler=scaler)
    batches = window(4, size=64)
    for _ in range(3):
        mine = [batches[number] for number in share[world.rank]]
        for x, y in stepper.micro_batches(mine if world.rank else iter(mine)):
            stepper.backward(
                nn.functional.cross_entropy(model(x), y, reduction="sum"), weight=len(y)
            )
        assert stepper.step().reason is None
    return [scaler.get_scale()], [parameter.detach().clone() for parameter in model.parameters()]


def test_a_loss_scaler_bears_sums_over_plain_lists_of_batches_as_it_bears_means() -> None:
    small = run_ranks(in_half, 1, args=(64.0, [[0, 1, 2, 3]]))[0]
    for share in ([[0, 1, 2, 3]], [[0], [1, 2, 3]], [[], [0, 1, 2, 3]]):
        for (scale,), weights in run_ranks(in_half, len(share), args=(2.0**16, share)):
            assert scale == 2.0**16
            for a, b in zip(weights, small[1], strict=True):
                assert zoo.distance(a, b) < 1e-2


def idle_and_busy(world: lockstep.World) -> tuple[list[Tensor], tuple[int, ...], float, bool]:
    """Two micro-batches on three ranks: the last rank has none, and yet nobody waits."""
    model = zoo.build("cnn")
    stepper = stepper_for(model)
    loader = lockstep.Loader(
        TensorDataset(*zoo.samples(8)), global_batch=8, micro_batch=4, shuffle=False
    )
    for epoch in loader.epochs(2):
        for batches in epoch:
            for x, y in stepper.micro_batches(batches):
                stepper.backward(zoo.loss_sum(model(x), y), weight=len(y))
            if world.rank == 2:
                stepper.request_stop()
            result = stepper.step()
    return (
        [value.clone() for value in model.state_dict().values()],
        result.samples_by_rank,
        result.weight,
        result.stop,
    )


def test_a_rank_without_micro_batches_takes_part_with_zeros() -> None:
    ranks = run_ranks(idle_and_busy, 3)
    alone = run_ranks(idle_and_busy, 1)[0]
    for weights, samples, weight, stop in ranks:
        assert samples == (4, 4, 0)
        assert (weight, stop) == (8.0, True)
        for a, b in zip(weights, alone[0], strict=True):
            assert zoo.distance(a, b) < 1e-6


class Drifting(nn.Module):
    """A buffer that begins to move late, and on one rank only; another is assigned, not written
    to; a third never moves.
    """

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)
        self.register_buffer("late", torch.zeros(2))
        self.register_buffer("assigned", torch.zeros(()))
        self.register_buffer("table", torch.arange(5.0))
        self.move_late = False

    def forward(self, x: Tensor) -> Tensor:
        self.assigned = self.assigned + x.mean().detach()
        if self.move_late:
            self.late.add_(1)
        return self.linear(x)


def drift(world: lockstep.World) -> list[list[float]]:
    model = Drifting()
    stepper = stepper_for(model)
    seen = []
    for step in range(4):
        model.move_late = step >= 2 and world.rank == 0
        for x, y in stepper.micro_batches([(x + world.rank, y) for x, y in window()]):
            stepper.backward(zoo.loss_sum(model(x), y), weight=4)
        stepper.step()
        seen.append([*model.late.tolist(), model.assigned.item(), *model.table.tolist()])
    return seen


def test_buffers_move_once_a_step_by_the_weighted_mean_of_all_ranks() -> None:
    first, second = run_ranks(drift, 2)
    assert first == second
    assert [row[0] for row in first[:2]] == [0.0, 0.0]
    assert first[2][0] == 2.0  # the step in which it was found out: rank 0's value, two forwards
    # then the mean over four micro-batches of which rank 0's two moved it by 1
    assert first[3][0] == pytest.approx(2.5)
    per_step = first[0][2]
    assert first[3][2] == pytest.approx(4 * per_step, rel=1e-5)
    assert first[3][3:] == [0.0, 1.0, 2.0, 3.0, 4.0]


class Noisy(torch.optim.SGD):
    """Adds noise to the weights, as Langevin dynamics does."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            parameter.data += 0.1 * torch.randn_like(parameter) + np.random.rand() + random.random()


def drawn() -> list[float]:
    """A script's own draws, an odd number of normal ones among them."""
    return [
        *torch.randperm(12).tolist(),
        *torch.randn(3).tolist(),
        float(np.random.rand()),
        float(np.random.randn()),
        random.gauss(0, 1),
    ]


def walk(stepper: lockstep.Stepper, batches: Iterable[Any], after_first: str = "") -> list[Tensor]:
    walked = []
    for x, y in stepper.micro_batches(batches):
        drawn()  # from the micro-batch's stream
        stepper.backward(zoo.loss_sum(stepper.model(x), y), weight=len(y))
        walked.append(x)
        if after_first == "break":
            break
        if after_first == "raise":
            raise ZeroDivisionError
    return walked


def draws_between_windows(world: lockstep.World) -> tuple[list[list[float]], list[Tensor]]:
    lockstep.seed(3)
    model = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.5), nn.Linear(16, 3))
    stepper = lockstep.Stepper(model, Noisy(model.parameters(), lr=0.1), seed=5, checks="off")
    # another number of micro-batches on each rank
    mine = window(6)[world.rank : 1 + 3 * world.rank]
    found = [drawn()]
    for after_first in ("", "break", "raise"):
        with suppress(ZeroDivisionError):
            walk(stepper, mine, after_first)
        found.append(drawn())
        stepper.step()
        found.append(drawn())
    return found, [parameter.detach().clone() for parameter in model.parameters()]


def test_what_a_script_draws_between_windows_is_its_own_and_equal_on_all_ranks() -> None:
    (ones, first), (others, second) = run_ranks(draws_between_windows, 2)
    with randomness.preserved():
        lockstep.seed(3)
        nn.Sequential(nn.Linear(6, 16), nn.Linear(16, 3))
        expected = [drawn() for _ in ones]
    assert ones == expected
    assert others == expected
    # the optimizer drew alike
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_batches_that_are_drawn_as_the_window_is_walked_go_on_in_the_scripts_stream(
    world: lockstep.World,
) -> None:
    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        return ((torch.randn(4, 6), torch.randint(0, 3, (4,))) for _ in range(3))

    stepper = stepper_for(zoo.build("mlp"))
    with randomness.preserved():
        torch.manual_seed(11)
        expected = [x for _ in range(2) for x, _ in batches()]
        torch.manual_seed(11)
        for part in (expected[:3], expected[3:]):
            assert all(
                torch.equal(a, b) for a, b in zip(walk(stepper, batches()), part, strict=True)
            )
            stepper.step()


def dropout(world: lockstep.World) -> list[Tensor]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.5), nn.Linear(16, 3))
    stepper = stepper_for(model, seed=5)
    loader = lockstep.Loader(
        TensorDataset(*zoo.samples(32)), global_batch=16, micro_batch=4, seed=5
    )
    for epoch in loader.epochs(2):
        for batches in epoch:
            for x, y in stepper.micro_batches(batches):
                stepper.backward(zoo.loss_sum(model(x), y), weight=len(y))
            stepper.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_dropout_and_order_do_not_depend_on_the_world_size() -> None:
    alone = run_ranks(dropout, 1)[0]
    for workers in (2, 3):
        for weights in run_ranks(dropout, workers):
            for a, b in zip(weights, alone, strict=True):
                assert zoo.distance(a, b) < 1e-6


@pytest.mark.parametrize("kind", ["sgd", "adamw", "adam"])
def test_a_fused_optimizer_divides_as_it_reads_and_leaves_the_same(
    world: lockstep.World, kind: str
) -> None:
    found = []
    for fused in (False, True):
        model = zoo.build("mlp")
        build = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW, "adam": torch.optim.Adam}[kind]
        stepper = lockstep.Stepper(
            model, build(model.parameters(), lr=1e-2, fused=fused), clip=0.05
        )  # type: ignore[operator]
        for _ in range(3):
            for x, y in stepper.micro_batches(window(3)):
                stepper.backward(zoo.loss_sum(model(x), y), weight=len(y))
            stepper.step()
        gradients = [
            parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None
        ]
        found.append(
            [*gradients, *(parameter.detach().clone() for parameter in model.parameters())]
        )
    for a, b in zip(*found, strict=True):
        assert zoo.distance(a, b) < 1e-5
