"""What one device shows of a step: the weights are those of a plain training, in every precision, compiled and in other streams; and
the host does not wait for a GPU.
"""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lockstep
from lockstep.errors import UsageError
from tests.gpu.training import STEPS, Training, close, equal, make_model, no_waiting, samples


def plain(device: str, steps: int = STEPS) -> dict[str, Tensor]:
    """The same training without Lockstep: BatchNorm's statistics aside, which a Stepper averages over micro-batches."""
    with lockstep.init(device="cpu") as world:
        model = make_model(device)
        adam = torch.optim.AdamW(model.parameters(), lr=1e-2)
        done = 0
        for epoch in lockstep.Loader(
            samples(), global_batch=16, micro_batch=4, device=device, rank=0, size=1
        ).epochs(2):
            for window in epoch:
                if done < steps:
                    adam.zero_grad()
                    for x, y in window:
                        (F.cross_entropy(model(x), y, reduction="sum") / 16).backward()
                    adam.step()
                    done += 1
        assert world.size == 1
    return {name: each.detach().cpu() for name, each in model.named_parameters()}


def parameters(training: Training) -> dict[str, Tensor]:
    return {name: each.detach().cpu() for name, each in training.model.named_parameters()}


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("exact", [False, True])
def test_a_steppers_weights_are_those_of_a_plain_loop(
    device: str, fused: bool, exact: bool
) -> None:
    expected = plain(device)
    with lockstep.init(device=device) as world:
        found = Training(world, fused=fused, exact=exact).walk()
    close(parameters(found), expected, 1e-5)


def test_the_wrapper_gives_the_gradients_of_the_bare_module(world: lockstep.World) -> None:
    model = make_model(world.device)
    bare = copy.deepcopy(model)
    ddp = lockstep.DistributedDataParallel(model)
    for x, y in torch.utils.data.DataLoader(samples(), batch_size=16):
        x, y = x.to(world.device), y.to(world.device)
        for each in (ddp, bare):
            each.zero_grad()
            F.cross_entropy(each(x), y).backward()
        for ours, theirs in zip(ddp.parameters(), bare.parameters(), strict=True):
            assert ours.grad is not None
            assert theirs.grad is not None
            assert torch.equal(ours.grad, theirs.grad)


@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("exact", [False, True])
def test_a_step_does_not_wait_for_the_device(
    world: lockstep.World, clip: float | None, scaled: bool, exact: bool
) -> None:
    scaler = torch.amp.GradScaler(world.device.type) if scaled else None
    training = Training(world, fused=True, clip=clip, scaler=scaler, exact=exact)
    training.walk(3)  # the first ones lay buckets, agree and compare
    (epoch,) = training.loader.epochs(2, start=1)
    windows, results = list(epoch), []
    with no_waiting(world.device):
        for window in windows:
            for batch in training.stepper.micro_batches(window):
                training.micro_batch(*batch)
            results.append(training.stepper.step())
    assert all(result.applied for result in results)
    assert all((result.norm is None) == (clip is None) for result in results)


@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float16])
def test_half_precision_learns_and_skips_what_overflows(
    world: lockstep.World, precision: torch.dtype
) -> None:
    fp16 = precision == torch.float16
    scaler = torch.amp.GradScaler(world.device.type, init_scale=2.0**26) if fp16 else None
    training = Training(world, fused=True, scaler=scaler)
    inner, skipped = training.model, 0
    for epoch in training.loader.epochs(8):
        for window in epoch:
            for x, y in training.stepper.micro_batches(window):
                with torch.autocast(world.device.type, precision):
                    output = inner(x)
                assert output.dtype == precision
                loss = F.cross_entropy(output.float(), y, reduction="sum")
                training.stepper.backward(loss, weight=len(y))
            result = training.stepper.step()
            skipped += not result.applied
            training.losses.append(result.loss)
    if scaler is not None:
        assert scaler.get_scale() == 2.0 ** (26 - skipped)
    assert 0 < skipped < 20 if fp16 else skipped == 0
    assert sum(training.losses[-3:]) < sum(training.losses[:3])


def test_a_compiled_model_trains_alike(world: lockstep.World) -> None:
    backend = "inductor" if world.device.type == "cuda" else "eager"
    eager = Training(world).walk()
    compiled = Training(world, compiled=backend).walk()
    close(compiled.weights(), eager.weights(), 1e-4)


def test_a_loss_may_be_computed_in_another_stream(world: lockstep.World) -> None:
    expected = Training(world).walk().weights()
    side: Any = nullcontext()
    if world.device.type == "cuda":
        stream = torch.cuda.Stream(world.device)
        stream.wait_stream(torch.cuda.current_stream(world.device))
        side = torch.cuda.stream(stream)
    with side:
        found = Training(world).walk().weights()
    if world.device.type == "cuda":
        torch.cuda.synchronize()
    assert equal(found, expected)


@pytest.mark.gpu
def test_gradients_take_the_memory_of_the_parameters_once(world: lockstep.World) -> None:
    """No second copy of them lies in the buckets: the peak is that of a bare loop."""
    layers = [nn.Linear(1024, 1024) for _ in range(8)]
    torch.manual_seed(0)
    x = torch.randn(4, 1024, device=world.device)

    def peak(ours: bool) -> int:
        model = copy.deepcopy(nn.Sequential(*layers)).to(world.device)
        sgd = torch.optim.SGD(model.parameters(), lr=1e-3)
        stepper = lockstep.Stepper(model, sgd, world=world) if ours else None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        for _ in range(3):
            if stepper is None:
                sgd.zero_grad()
                model(x).square().sum().backward()
                sgd.step()
            else:
                for mine in stepper.micro_batches([x]):
                    stepper.backward(model(mine).square().sum(), weight=4)
                stepper.step()
        return torch.cuda.max_memory_allocated()

    size = sum(each.nbytes for layer in layers for each in layer.parameters())
    bare = peak(False)
    assert peak(True) < bare + size // 8


@pytest.mark.gpu
def test_a_model_on_the_cpu_is_refused(world: lockstep.World) -> None:
    with pytest.raises(UsageError) as caught:
        lockstep.DistributedDataParallel(make_model("cpu"))
    assert caught.value.code == "model-off-the-world"


@pytest.mark.gpu
def test_sync_batch_norm_converts_and_trains(world: lockstep.World) -> None:
    model = nn.SyncBatchNorm.convert_sync_batchnorm(make_model(world.device))
    ddp = lockstep.DistributedDataParallel(model)
    sgd = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for x, y in torch.utils.data.DataLoader(samples(), batch_size=16):
        sgd.zero_grad()
        F.cross_entropy(ddp(x.to(world.device)), y.to(world.device)).backward()
        sgd.step()
    assert int(model[1].num_batches_tracked) == 3  # type: ignore[index]
