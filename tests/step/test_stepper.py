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
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import lockstep
from lockstep.errors import LockstepWarning, WorkerFailed
from lockstep.runtime import randomness
from lockstep.testing import run_ranks
from lockstep.updates.update import Applied
from tests import zoo
from tests.refused import refused
from tests.step.walking import same, walk, weights
from tests.teams import on_team


@pytest.fixture
def world() -> Iterator[lockstep.World]:
    with lockstep.init(backend="gloo") as world:
        yield world


def stepper_for(model: nn.Module, lr: float = 0.1, **options: Any) -> lockstep.Stepper:
    return lockstep.Stepper(model, torch.optim.SGD(model.parameters(), lr=lr), **options)


def window(count: int = 2, size: int = 4) -> list[tuple[Tensor, Tensor]]:
    x, y = zoo.samples(count * size)
    return list(zip(x.split(size), y.split(size), strict=True))


def near(ours: list[Tensor], theirs: list[Tensor], within: float) -> bool:
    return all(zoo.distance(a, b) <= within for a, b in zip(ours, theirs, strict=True))


def test_calls_that_mean_nothing_are_refused(world: lockstep.World) -> None:
    model = zoo.build("mlp")
    stepper = stepper_for(model)
    with refused("backward-outside-window"):
        stepper.backward(model(torch.zeros(1, 6)).sum(), weight=1)
    with refused("step-without-window"):
        stepper.step()
    for x, y in stepper.micro_batches(window()):
        loss = zoo.loss_sum(model(x), y)
        for weight in (-1.0, math.inf, math.nan):
            with refused("wrong-value", name="weight", value=weight):
                stepper.backward(loss, weight=weight)
        with refused("loss-not-one-number", what="the loss", shape=[4, 3]):
            stepper.backward(model(x), weight=4)
        with refused("unknown-choice", name="reduction", value="avg", choices=("sum", "mean")):
            stepper.backward(loss, weight=4, reduction="avg")  # type: ignore[arg-type]
        stepper.backward(loss, weight=4)
        with refused("second-backward"):
            stepper.backward(zoo.loss_sum(model(x), y), weight=4)
        with refused("step-inside-window"):
            stepper.step()
    with refused("window-still-open"):
        next(stepper.micro_batches(window()))
    assert stepper.step().weight == 8
    second = stepper_for(model)  # takes the model over
    assert walk(second, window()).applied
    with refused("parameters-taken-over"):
        next(stepper.micro_batches(window()))


def test_what_cannot_be_trained_is_refused(world: lockstep.World) -> None:
    model = zoo.build("mlp")
    with refused("optimizer-of-another-model", group=0, shape=[32, 6]):
        lockstep.Stepper(model, torch.optim.SGD(zoo.build("mlp").parameters(), lr=0.1))
    with refused("optimizer-needs-closure", optimizer="LBFGS"):
        lockstep.Stepper(model, torch.optim.LBFGS(model.parameters()))
    embedding = nn.Embedding(9, 3, sparse=True)
    with refused("optimizer-needs-sparse-gradients"):
        lockstep.Stepper(embedding, torch.optim.SparseAdam(embedding.parameters()))
    for clip in (0, -1.0, math.nan):
        with refused("wrong-value", name="clip", value=clip):
            stepper_for(model, clip=clip)
    lazy = nn.Sequential(nn.Linear(6, 4), nn.LazyLinear(3))
    with refused("lazy-parameter", parameter="1.weight"):
        stepper_for(lazy)
    lazy(torch.zeros(1, 6))
    stepper_for(lazy)
    with refused("no-scheduler", scheduler_per="epoch"):
        stepper_for(model, scheduler_per="epoch")
    # a scheduler wraps the optimizer's step, which is no closure
    with_scheduler = torch.optim.AdamW(model.parameters())
    torch.optim.lr_scheduler.LambdaLR(with_scheduler, lambda step: 1.0)
    lockstep.Stepper(model, with_scheduler)
    with refused("no-trainable-parameter"):
        stepper_for(model.requires_grad_(False))


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
    before = weights(model)
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
    assert same(before, weights(model))


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


def test_a_gradient_that_is_added_after_its_bucket_has_left_is_named(world: lockstep.World) -> None:
    model = zoo.build("mlp")
    stepper = stepper_for(model)
    for x, y in stepper.micro_batches(window(count=1)):
        stepper.backward(zoo.loss_sum(model(x), y), weight=4)
        zoo.loss_sum(model(x), y).backward()
    with refused("gradient-cleared") as caught:
        stepper.step()
    assert re.fullmatch(r"\d\.(weight|bias)", caught.value.values["parameter"])


def test_buckets_are_as_large_as_asked_for(world: lockstep.World) -> None:
    model = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(8)])  # 16 KiB each
    for bucket_mb, count in {None: 1, 2**-6: 8, 2**-5: 4}.items():
        assert len(stepper_for(model, bucket_mb=bucket_mb).reducer.buckets) == count
    with refused("wrong-value", name="bucket_mb", value=0):
        stepper_for(model, bucket_mb=0)
    with refused("set-on-the-wrapper", name="bucket_mb", value=5, keyword="bucket_cap_mb"):
        stepper_for(lockstep.DistributedDataParallel(model), bucket_mb=5)


def test_gradients_are_views_of_the_buckets_and_no_second_copy(world: lockstep.World) -> None:
    """With the strides of their parameters."""
    model = zoo.build("cnn").to(memory_format=torch.channels_last)
    stepper = stepper_for(model)
    for _ in range(2):
        walk(stepper, window())
        memory = {bucket.sum.untyped_storage().data_ptr() for bucket in stepper.reducer.buckets}
        for parameter in model.parameters():
            assert parameter.grad is not None
            assert parameter.grad.untyped_storage().data_ptr() in memory
            assert parameter.grad.stride() == parameter.stride()
    padded = sum(-(-parameter.numel() // 64) * 64 for parameter in model.parameters())
    assert stepper.reducer.layout.bytes <= 4 * (padded + 64)


def test_a_mean_that_is_said_to_be_one_is_as_a_sum_also_over_nothing(world: lockstep.World) -> None:
    """Only the second micro-batch has targets; the mean of nothing is nan."""
    results = {}
    for reduction in ("sum", "mean"):
        model = zoo.build("mlp")
        stepper = stepper_for(model)
        for number, (x, y) in enumerate(stepper.micro_batches(window(3))):
            target = y if number == 1 else torch.full_like(y, -100)
            loss = F.cross_entropy(model(x), target, reduction=reduction)
            weight = int((target >= 0).sum())
            stepper.backward(loss, weight=weight, reduction=reduction)  # type: ignore[arg-type]
        result = stepper.step()
        assert result.weight == 4
        results[reduction] = result.loss, weights(model)
    assert results["sum"][0] == pytest.approx(results["mean"][0], rel=1e-6)
    assert near(results["sum"][1], results["mean"][1], 1e-6)


def test_a_window_of_weight_0_is_skipped_also_by_the_scheduler_and_says_so(
    world: lockstep.World,
) -> None:
    model = zoo.build("cnn")
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(sgd, 1, 0.5)
    stepper = lockstep.Stepper(model, sgd, scheduler=scheduler)
    walk(stepper, window())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for x, y in stepper.micro_batches(window()):
        stepper.backward(zoo.loss_sum(model(x), y) * 0, weight=0)
    with pytest.warns(
        LockstepWarning, match="step 2 was skipped: every rank's weight is 0"
    ) as said:
        result = stepper.step()
    assert said[0].filename == __file__
    assert (result.applied, result.weight) == (False, 0.0)
    assert result.reason == "every rank's weight is 0: the window has no samples"
    assert math.isnan(result.loss)
    assert same(dict(model.state_dict()), before)
    assert scheduler.get_last_lr() == [0.5]


def with_slope_of_nan(model: nn.Module, x: Tensor) -> Tensor:
    """A loss of 0 whose gradient is nan."""
    output = model(x)
    return torch.sqrt((output - output.detach()).square().sum())


@pytest.mark.parametrize("bad", [False, True])
def test_what_only_the_device_knows_is_read_when_somebody_looks(
    world: lockstep.World, monkeypatch: pytest.MonkeyPatch, bad: bool
) -> None:
    model = zoo.build("mlp")
    before = weights(model)
    adamw = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    stepper = lockstep.Stepper(model, adamw, clip=1.0)
    stepper._outcomes.known_at_once = False  # as on a GPU
    read: list[Applied] = []
    look = Applied._read
    monkeypatch.setattr(Applied, "_read", lambda self: (read.append(self), look(self))[1])
    for x, _ in stepper.micro_batches(window()):
        stepper.backward(with_slope_of_nan(model, x) if bad else model(x).sum(), weight=4)
    result = stepper.step()
    assert not read, "the host waited for the gradient"
    assert same(weights(model), before) == bad
    warned = "step 1 was skipped: the gradient's norm is nan"
    with pytest.warns(LockstepWarning, match=warned) if bad else nullcontext():
        for x, y in stepper.micro_batches(window()):
            stepper.backward(zoo.loss_sum(model(x), y), weight=4)
    assert result.applied != bad
    stepper.step()


def test_a_loss_scaler_changes_nothing_but_the_range(world: lockstep.World) -> None:
    results = []
    for scaler in (None, torch.amp.GradScaler("cpu", init_scale=2.0**10)):
        model = zoo.build("mlp")
        last = walk(stepper_for(model, scaler=scaler, clip=0.5), window(3))
        results.append((last.norm, weights(model)))
    (norm, plain), (scaled_norm, scaled) = results
    assert norm == pytest.approx(scaled_norm, rel=1e-5)
    assert near(plain, scaled, 1e-6)


class InHalf(nn.Module):
    """Computes in fp16, where a sum over many samples overflows and their mean does not."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.half(), self.linear.weight.half(), self.linear.bias.half()).float()


def in_half(
    world: lockstep.World, scale: float, share: list[list[int]]
) -> tuple[float, list[Tensor]]:
    """Three steps over plain lists of micro-batches; `share`: which of them each rank has."""
    torch.manual_seed(7)
    model = InHalf()
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    stepper = stepper_for(model, scaler=scaler)
    batches = window(4, size=64)
    for _ in range(3):
        local = [batches[number] for number in share[world.rank]]
        assert walk(stepper, local if world.rank else iter(local)).reason is None
    return scaler.get_scale(), weights(model)


def test_a_loss_scaler_bears_sums_over_plain_lists_of_batches_as_it_bears_means() -> None:
    ((_, small),) = on_team(in_half, 1, (64.0, [[0, 1, 2, 3]]))
    for share in ([[0, 1, 2, 3]], [[0], [1, 2, 3]], [[], [0, 1, 2, 3]]):
        for scale, trained in on_team(in_half, len(share), (2.0**16, share)):
            assert scale == 2.0**16
            assert near(trained, small, 1e-2)


def idle_and_busy(world: lockstep.World) -> tuple[tuple[int, ...], float, bool]:
    """Two micro-batches on three ranks: the last rank has none, and yet nobody waits."""
    stepper = stepper_for(zoo.build("cnn"))
    data = TensorDataset(*zoo.samples(8))
    loader = lockstep.Loader(data, global_batch=8, micro_batch=4, shuffle=False)
    (window,) = next(iter(loader.epochs(1)))
    if world.rank == 2:
        stepper.request_stop()
    result = walk(stepper, window)
    return result.samples_by_rank, result.weight, result.stop


def test_a_rank_without_micro_batches_takes_part_and_is_heard() -> None:
    assert on_team(idle_and_busy, 3) == [((4, 4, 0), 8.0, True)] * 3


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
        walk(stepper, [(x + world.rank, y) for x, y in window()])
        seen.append([*model.late.tolist(), model.assigned.item(), *model.table.tolist()])
    return seen


def test_buffers_move_once_a_step_by_the_weighted_mean_of_all_ranks() -> None:
    first, second = on_team(drift, 2)
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


def walk_and_draw(
    stepper: lockstep.Stepper, batches: Iterable[Any], after_first: str = ""
) -> list[Tensor]:
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
    local = window(6)[world.rank : 1 + 3 * world.rank]
    found = [drawn()]
    for after_first in ("", "break", "raise"):
        with suppress(ZeroDivisionError):
            walk_and_draw(stepper, local, after_first)
        found.append(drawn())
        stepper.step()
        found.append(drawn())
    return found, weights(model)


def test_a_counter_counts_steps_whatever_they_weigh(world: lockstep.World) -> None:
    """w * (1 / w) is less than 1 for some weights."""
    model = nn.BatchNorm1d(1)
    stepper = stepper_for(model)
    for step, samples in enumerate((41, 47, 55, 61), 1):
        for x in stepper.micro_batches([torch.randn(samples, 1)]):
            stepper.backward(model(x).sum(), weight=samples)
        stepper.step()
        assert model.num_batches_tracked == step


def draws_of_micro_batches(world: lockstep.World) -> list[float]:
    model = nn.Linear(1, 1)
    stepper, draws = stepper_for(model), []
    for x in stepper.micro_batches([torch.ones(1, 1)] * 3):
        draws.append(float(torch.rand(())))
        stepper.backward(model(x).sum(), weight=1)
    stepper.step()
    return draws


def test_every_micro_batch_of_plain_lists_has_random_numbers_of_its_own() -> None:
    draws = [draw for rank in on_team(draws_of_micro_batches, 3) for draw in rank]
    assert len(set(draws)) == 9


def test_what_a_script_draws_between_windows_is_its_own_and_equal_on_all_ranks() -> None:
    (ones, first), (others, second) = on_team(draws_between_windows, 2)
    with randomness.preserved():
        lockstep.seed(3)
        nn.Sequential(nn.Linear(6, 16), nn.Linear(16, 3))
        expected = [drawn() for _ in ones]
    assert ones == expected
    assert others == expected
    # the optimizer drew alike
    assert same(first, second)


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
            assert same(walk_and_draw(stepper, batches()), part)
            stepper.step()
