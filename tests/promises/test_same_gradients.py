"""Promise 1: N ranks with different data give the gradients, and the training, of one process over
the same micro-batches.

The oracle is plain torch in this process: a loop over the micro-batches, no code of Lockstep but
the cut that says which samples they hold. The second oracle is torch's own DistributedDataParallel.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep.data.windows import Plan
from lockstep.testing import run_ranks
from tests import zoo

# three steps an epoch, of 16, 16 and 10 samples: the last slot of the tail holds 2
SAMPLES, GLOBAL, MICRO, STEPS = 42, 16, 4, 10


@dataclass
class Trained:
    gradients: dict[str, Tensor]  # of the first step
    tail: dict[str, Tensor]  # of the third, the ragged one
    weights: dict[str, Tensor]  # after STEPS steps, buffers too
    losses: list[float]


def optimizer(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if kind == "adamw":
        return torch.optim.AdamW(parameters, lr=1e-3)
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def one_process(name: str, kind: str, clip: float | None) -> Trained:
    torch.set_num_threads(1)
    model = zoo.build(name)
    unused = {f"unused.{end}" for end in ("weight", "bias")}
    steps = optimizer(kind, model)
    plan = Plan(samples=SAMPLES, global_batch=GLOBAL, micro_batch=MICRO, drop_last=False)
    x, y = zoo.samples(SAMPLES)
    seen: list[dict[str, Tensor]] = []
    losses = []
    for step in range(STEPS):
        cut = plan.cut(step)
        steps.zero_grad()
        start = {key: buffer.clone() for key, buffer in model.named_buffers()}
        moved = {
            key: torch.zeros_like(buffer, dtype=torch.float64) for key, buffer in start.items()
        }
        weight, total = 0, 0.0
        for slot in range(cut.slots):
            where = list(cut.positions(slot))
            if not where:
                continue
            for key, buffer in model.named_buffers():
                buffer.copy_(start[key])
            loss = zoo.loss_sum(model(x[where]), y[where])
            loss.backward()
            weight, total = weight + len(where), total + loss.item()
            for key, buffer in model.named_buffers():
                moved[key] += len(where) * (buffer.double() - start[key].double())
        for key, parameter in model.named_parameters():
            if parameter.grad is not None:
                parameter.grad /= weight
            elif key in unused:
                parameter.grad = torch.zeros_like(parameter)
        for key, buffer in model.named_buffers():
            buffer.copy_(start[key] + moved[key] / weight)
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        seen.append(gradients(model))
        losses.append(total / weight)
        steps.step()
    return Trained(
        seen[0], seen[2], {key: value.clone() for key, value in model.state_dict().items()}, losses
    )


def on_ranks(
    world: lockstep.World,
    name: str,
    kind: str,
    clip: float | None,
    reduce: str,
    balance: str | None = None,
) -> Trained:
    torch.manual_seed(world.rank)  # replicas begin equal although their random states differ
    model = zoo.MODELS[name]() if world.rank else zoo.build(name)
    unused = "zeros" if name == "awkward" else "error"
    stepper = lockstep.Stepper(
        model, optimizer(kind, model), clip=clip, reduce=reduce, unused=unused
    )
    loader = lockstep.Loader(
        TensorDataset(*zoo.samples(SAMPLES)),
        global_batch=GLOBAL,
        micro_batch=MICRO,
        shuffle=False,
        balance=balance,
    )
    seen, losses = [], []
    for epoch in loader.epochs(4):
        for window in epoch:
            for x, y in stepper.micro_batches(window):
                stepper.backward(zoo.loss_sum(model(x), y), weight=len(y))
            losses.append(stepper.step().loss)
            seen.append(gradients(model))
            if len(losses) == STEPS:
                return Trained(seen[0], seen[2], model.state_dict(), losses)
    raise AssertionError("the epochs held fewer steps than the test asks for")


BALANCES = ("2,1,1", "0,3,1", "2,2,0")


def cases(workers: int) -> list[tuple[Any, ...]]:
    """What the tests of this file ask of so many ranks."""
    found: list[tuple[Any, ...]] = [(name, "sgd", None, "auto") for name in zoo.MODELS]
    if workers == 1:
        return [
            *found,
            *(("awkward", "sgd", None, reduce) for reduce in ("shared_memory", "central")),
        ]
    found += [("awkward", "sgd", None, reduce) for reduce in ("ring", "tree", "halving_doubling")]
    if workers == 4:
        return found
    found += [("awkward", "sgd", None, reduce) for reduce in ("native", "shared_memory", "central")]
    found += [
        ("mlp", "sgd", 0.1, "auto"),
        *((name, "adamw", None, "auto") for name in ("mlp", "cnn", "rnn")),
    ]
    if workers == 3:
        found += [
            (name, "sgd", None, "auto", balance)
            for name in ("cnn", "awkward")
            for balance in BALANCES
        ]
    return found


def all_on_ranks(world: lockstep.World) -> list[Trained]:
    return [on_ranks(world, *case) for case in cases(world.size)]


@cache
def all_ranks(workers: int) -> list[list[Trained]]:
    """By rank and case: ranks start once for all tests."""
    return run_ranks(all_on_ranks, workers)


def ranks_of(workers: int, *case: Any) -> list[Trained]:
    number = cases(workers).index(case)
    return [rank[number] for rank in all_ranks(workers)]


def compare(ours: dict[str, Tensor], theirs: dict[str, Tensor], within: float = 1e-6) -> None:
    assert ours.keys() == theirs.keys()
    far = {
        name: zoo.distance(ours[name], theirs[name])
        for name in ours
        if zoo.distance(ours[name], theirs[name]) > within
    }
    assert not far


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
@pytest.mark.parametrize("name", zoo.MODELS)
def test_gradients_and_ten_steps_of_momentum_equal_one_process(name: str, workers: int) -> None:
    expected = one_process(name, "sgd", clip=None)
    for rank in ranks_of(workers, name, "sgd", None, "auto"):
        compare(rank.gradients, expected.gradients)
        compare(rank.tail, expected.tail)
        compare(rank.weights, expected.weights)
        assert rank.losses == pytest.approx(expected.losses, rel=1e-6)


@pytest.mark.parametrize("workers", [2, 3])
def test_clipping_comes_once_after_the_sum(workers: int) -> None:
    expected = one_process("mlp", "sgd", clip=0.1)
    for rank in ranks_of(workers, "mlp", "sgd", 0.1, "auto"):
        compare(rank.gradients, expected.gradients)
        compare(rank.weights, expected.weights)


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("name", ["mlp", "cnn", "rnn"])
def test_adamw_equals_one_process_where_gradients_are_not_noise(name: str, workers: int) -> None:
    expected = one_process(name, "adamw", clip=None)
    largest = max(gradient.abs().max() for gradient in expected.gradients.values())
    noise = {
        name
        for name, gradient in expected.gradients.items()
        if gradient.abs().max() < 1e-6 * largest
    }
    for rank in ranks_of(workers, name, "adamw", None, "auto"):
        compare(
            {k: v for k, v in rank.weights.items() if k not in noise},
            {k: v for k, v in expected.weights.items() if k not in noise},
        )


@pytest.mark.parametrize(
    ("workers", "reduce"),
    [
        (1, "shared_memory"),
        (2, "native"),
        (3, "native"),
        (2, "shared_memory"),
        (3, "shared_memory"),
    ],
)
def test_the_naive_reference_gives_the_same_as_the_fast_path(workers: int, reduce: str) -> None:
    fast = ranks_of(workers, "awkward", "sgd", None, reduce)
    naive = ranks_of(workers, "awkward", "sgd", None, "central")
    for a, b in zip(fast, naive, strict=True):
        compare(a.gradients, b.gradients)
        compare(a.weights, b.weights)


@pytest.mark.parametrize("workers", [2, 3, 4])
@pytest.mark.parametrize("reduce", ["ring", "tree", "halving_doubling"])
def test_our_own_schedules_give_the_gradients_of_one_process(workers: int, reduce: str) -> None:
    expected = one_process("awkward", "sgd", clip=None)
    ranks = ranks_of(workers, "awkward", "sgd", None, reduce)
    for rank in ranks:
        compare(rank.gradients, expected.gradients)
        compare(rank.tail, expected.tail)
        compare(rank.weights, expected.weights)
        assert all(
            torch.equal(value, ranks[0].weights[name]) for name, value in rank.weights.items()
        )


@pytest.mark.parametrize("name", ["cnn", "awkward"])
def test_ranks_with_uneven_shares_give_the_gradients_of_one_process(name: str) -> None:
    expected = one_process(name, "sgd", clip=None)
    for balance in BALANCES:
        for rank in ranks_of(3, name, "sgd", None, "auto", balance):
            compare(rank.gradients, expected.gradients)
            compare(rank.tail, expected.tail)
            compare(rank.weights, expected.weights)
            assert rank.losses == pytest.approx(expected.losses, rel=1e-6)


def test_all_ranks_end_with_the_same_bits() -> None:
    ranks = ranks_of(3, "cnn", "sgd", None, "auto")
    for rank in ranks[1:]:
        for name, value in rank.weights.items():
            assert torch.equal(value, ranks[0].weights[name]), name


def wrapped(world: lockstep.World, name: str, wrapper: str, steps: int) -> dict[str, Tensor]:
    """The same script with torch's wrapper and with ours; each rank has its own data."""
    model = zoo.build(name)
    ddp: nn.Module
    if wrapper == "torch":
        ddp = nn.parallel.DistributedDataParallel(
            model, broadcast_buffers=False, find_unused_parameters=name == "awkward"
        )
    else:
        ddp = lockstep.DistributedDataParallel(model, find_unused_parameters=name == "awkward")
    sgd = optimizer("sgd", model)
    x, y = zoo.samples(8 * world.size * steps)
    for step in range(steps):
        rows = range((step * world.size + world.rank) * 8, (step * world.size + world.rank + 1) * 8)
        sgd.zero_grad()
        (zoo.loss_sum(ddp(x[list(rows)]), y[list(rows)]) / 8).backward()
        sgd.step()
    return {key: parameter.detach().clone() for key, parameter in model.named_parameters()}


def each_wrapped(world: lockstep.World) -> dict[tuple[str, str], dict[str, Tensor]]:
    return {
        (name, wrapper): wrapped(world, name, wrapper, 10)
        for name in zoo.MODELS
        for wrapper in ("torch", "lockstep")
    }


@cache
def all_wrapped(workers: int) -> list[dict[tuple[str, str], dict[str, Tensor]]]:
    return run_ranks(each_wrapped, workers)


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("name", zoo.MODELS)
def test_the_wrapper_trains_as_torchs_does(name: str, workers: int) -> None:
    for rank in all_wrapped(workers):
        compare(rank[name, "lockstep"], rank[name, "torch"])
