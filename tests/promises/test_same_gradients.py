"""Promise 1: N ranks with different data give the gradients, and the training, of one process over
the same micro-batches; in exact mode, the same bits.

The reference is plain torch in this process: a loop over the micro-batches, no code of Lockstep but
the cut that says which samples they hold. A model with dropout is compared with Lockstep on one
rank, and so are the bits of exact mode. The second reference, torch's DistributedDataParallel, is in
test_drop_in.py.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import lockstep
from lockstep.data.windows import Plan
from tests import zoo
from tests.step.walking import gradients
from tests.teams import on_team

# three steps an epoch, of 16, 16 and 10 samples: the last micro-batch of the third is short
SAMPLES, GLOBAL, STEPS = 42, 16, 5


class Everything(nn.Module):
    """Dropout, a bias before BatchNorm (its gradient is rounding and nothing else), a tied and a
    0-d parameter, and one that only some micro-batches use.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 6, 2)
        self.norm = nn.BatchNorm2d(6)
        self.drop = nn.Dropout(0.3)
        self.inner = nn.Linear(12, 12)
        self.tied = nn.Linear(12, 12)
        self.tied.weight = self.inner.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.seldom = nn.Parameter(torch.ones(700))
        self.head = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.drop(F.relu(self.norm(self.conv(x.view(-1, 1, 2, 3))))).flatten(1)
        y = self.tied(F.relu(self.inner(y))) * self.scale
        if x[0, 0] > 0:
            y = y + self.seldom.sum() * 1e-3
        out: Tensor = self.head(y)
        return out


class Complex(nn.Module):
    """Parameters of three dtypes, whose squares have a negative real part."""

    def __init__(self) -> None:
        super().__init__()
        for name, dtype in (
            ("wide", torch.complex128),
            ("narrow", torch.complex64),
            ("real", torch.float32),
        ):
            value = torch.randn(6, 3, dtype=dtype)
            setattr(self, name, nn.Parameter(value * (1j if dtype.is_complex else 1)))

    def forward(self, x: Tensor) -> Tensor:
        squares = [(x.to(weight.dtype) @ weight).abs().square() for weight in self.parameters()]
        out: Tensor = squares[0].float() + squares[1] + squares[2]
        return out


NETS: dict[str, Callable[[], nn.Module]] = {
    **zoo.MODELS,
    "everything": Everything,
    "complex": Complex,
}
AXES: dict[str, Sequence[Any]] = {
    "net": tuple(NETS),
    "optimizer": ("sgd", "adamw"),
    "clip": (None, 0.1),
    "precision": ("fp32", "autocast", "bf16"),
    "micro_batch": (4, 2, 16),
    "bucket_mb": (None, 2**-10),
    "reduce": ("auto", "native", "shared_memory", "central", "ring", "tree", "halving_doubling"),
    "update": ("replicated", "sharded"),
    "weights": ("auto", "shared", "separate"),
    "exact": (False, True),
    "balance": ("equal", "first idle", "first twice", "ends only"),
    "workers": (1, 2, 3, 8),
}
TRAINING = ("net", "optimizer", "clip", "precision", "micro_batch", "bucket_mb")
METHOD = ("reduce", "update", "exact", "balance", "workers")
Case = Mapping[str, Any]


def allowed(case: Case) -> bool:
    exact_with = ("auto", "native", "shared_memory")
    return (
        (case["reduce"] in exact_with or not case["exact"])
        and (case["balance"] == "equal" or case["workers"] > 1)
        and (case["weights"] != "shared" or case["update"] == "sharded")
        and (case["net"] != "complex" or case["precision"] != "bf16")
    )


def shares(balance: str, workers: int) -> str | None:
    """How many parts of a window each rank computes, as a Loader takes it."""
    between = ["0" if balance == "ends only" else "1"] * (workers - 2)
    first = {"equal": None, "first idle": "0", "first twice": "2", "ends only": "7"}[balance]
    return None if first is None else ",".join([first, *between, "1"])


def completed(fixed: Case, choice: random.Random) -> Case | None:
    """An allowed case with these values, and others by chance. None if there is none."""
    for _ in range(100):
        case = {name: choice.choice(values) for name, values in AXES.items()} | fixed
        if allowed(case):
            return case
    return None


def pairs(case: Case) -> list[tuple[tuple[str, Any], ...]]:
    return list(itertools.combinations([(name, case[name]) for name in AXES], 2))


@cache
def pairwise() -> list[Case]:
    """Cases in which each value of each axis meets each value of every other axis."""
    choice = random.Random(0)
    missing: dict[tuple[tuple[str, Any], ...], None] = {}
    for one, other in itertools.combinations(AXES, 2):
        for values in itertools.product(AXES[one], AXES[other]):
            missing[tuple(zip((one, other), values, strict=True))] = None
    cases = []
    while missing:
        pair = next(iter(missing))
        del missing[pair]
        best, most = completed(dict(pair), choice), -1
        for _ in range(20 if best else 0):
            case = completed(dict(pair), choice)
            gain = sum(other in missing for other in pairs(case)) if case else 0
            if gain > most:
                best, most = case, gain
        if best is not None:
            for covered in pairs(best):
                missing.pop(covered, None)
            cases.append(best)
    return cases


@cache
def product() -> list[Case]:
    """Every method at every number of ranks; what is trained varies."""
    choice = random.Random(1)
    cases = []
    for values in itertools.product(*(AXES[name] for name in METHOD)):
        case = completed(dict(zip(METHOD, values, strict=True)), choice)
        if case is not None:
            cases.append(case)
    return cases


@dataclass
class Trained:
    gradients: dict[str, Tensor]  # of the first step
    tail: dict[str, Tensor]  # of the third, the ragged one
    weights: dict[str, Tensor]  # after STEPS steps, buffers too
    losses: list[float]
    norms: list[float | None]
    bits: str = ""
    """A digest of weights, buffers, optimizer state, losses and norms."""


def build(case: Case) -> nn.Module:
    torch.manual_seed(7)
    model = NETS[case["net"]]()
    return model.to(torch.bfloat16) if case["precision"] == "bf16" else model


def optimizer_of(case: Case, model: nn.Module) -> torch.optim.Optimizer:
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    # torch 2.13's fused SGD on CPUs gets the momentum of bfloat16 parameters wrong from step 2 on
    fused = case["net"] != "complex" and case["precision"] != "bf16"
    if case["optimizer"] == "adamw":
        return torch.optim.AdamW(parameters, lr=1e-3, fused=fused)
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, nesterov=True, fused=fused)


def loss_of(case: Case, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    autocast = case["precision"] == "autocast"
    with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
        output = model(x.to(torch.bfloat16) if case["precision"] == "bf16" else x)
    return zoo.loss_sum(output.float(), y)


def one_process(case: Case) -> Trained:
    """Plain torch. A sample's weight is 1/3."""
    model = build(case)
    optimizer = optimizer_of(case, model)
    plan = Plan(
        samples=SAMPLES, global_batch=GLOBAL, micro_batch=case["micro_batch"], drop_last=False
    )
    x, y = zoo.samples(SAMPLES)
    seen: list[dict[str, Tensor]] = []
    losses, norms = [], []
    for step in range(STEPS):
        cut = plan.cut(step)
        optimizer.zero_grad()
        start = {name: buffer.clone() for name, buffer in model.named_buffers()}
        moved = {
            name: torch.zeros_like(buffer, dtype=torch.float64) for name, buffer in start.items()
        }
        weight, total = 0.0, 0.0
        for slot in range(cut.slots):
            where = list(cut.positions(slot))
            if not where:
                continue
            for name, buffer in model.named_buffers():
                buffer.copy_(start[name])
            loss = loss_of(case, model, x[where], y[where])
            loss.backward()
            weight, total = weight + len(where) / 3, total + loss.item()
            for name, buffer in model.named_buffers():
                moved[name] += len(where) / 3 * (buffer.double() - start[name].double())
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                parameter.grad /= weight
            elif name.startswith("unused."):
                parameter.grad = torch.zeros_like(parameter)
        for name, buffer in model.named_buffers():
            buffer.copy_(start[name] + moved[name] / weight)
        norm = case["clip"] and nn.utils.clip_grad_norm_(model.parameters(), case["clip"]).item()
        norms.append(norm)
        seen.append(gradients(model))
        losses.append(total / weight)
        optimizer.step()
    return Trained(seen[0], seen[2], dict(model.state_dict()), losses, norms)


def on_a_rank(world: lockstep.World, case: Case) -> Trained:
    model = build(case)
    if world.rank:  # replicas begin equal although their initial weights differ
        for parameter in model.parameters():
            nn.init.constant_(parameter, 0.1)
    torch.manual_seed(world.rank)
    stepper = lockstep.Stepper(
        model,
        optimizer_of(case, model),
        clip=case["clip"],
        bucket_mb=case["bucket_mb"],
        reduce=case["reduce"],
        update=case["update"],
        weights=case["weights"],
        exact=case["exact"],
        unused="error" if case["net"] in ("mlp", "cnn", "rnn", "complex") else "zeros",
        world=world,
    )
    loader = lockstep.Loader(
        TensorDataset(*zoo.samples(SAMPLES)),
        global_batch=GLOBAL,
        micro_batch=case["micro_batch"],
        shuffle=False,
        balance=shares(case["balance"], world.size),
    )
    seen, losses, norms = [], [], []
    windows = itertools.chain.from_iterable(loader.epochs(2))
    for window in itertools.islice(windows, STEPS):
        for x, y in stepper.micro_batches(window):
            stepper.backward(loss_of(case, model, x, y), weight=len(y) / 3)
        result = stepper.step()
        losses.append(result.loss)
        norms.append(None if result.norm is None else float(result.norm))
        seen.append(gradients(model) if case["update"] == "replicated" else {})
    loader.close()
    state = stepper.optimizer_state_dict()["state"]
    bits = hashlib.sha256(repr((losses, norms)).encode())
    for tensor in (*model.state_dict().values(), *tensors_of(state.values())):
        content = tensor.detach().contiguous().view(-1).view(torch.uint8)
        bits.update(content.numpy().tobytes())
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    return Trained(seen[0], seen[2], weights, losses, norms, bits.hexdigest())


def tensors_of(states: Iterable[Mapping[str, Any]]) -> Iterator[Tensor]:
    for state in states:
        for name in sorted(state):
            if isinstance(state[name], Tensor):
                yield state[name]


def on_ranks(world: lockstep.World, cases: Sequence[Case]) -> list[Trained]:
    results = []
    for case in cases:
        results.append(on_a_rank(world, case))
    return results


ALONE = {
    "reduce": "native",
    "update": "replicated",
    "weights": "auto",
    "balance": "equal",
    "workers": 1,
}
_references: dict[tuple[Any, ...], Trained] = {}


def references(cases: Sequence[Case], *, plain: bool) -> list[Trained]:
    """What each case is compared with: plain torch, or Lockstep on one rank."""
    exact = [not plain and case["exact"] for case in cases]
    keys = [
        (plain, own, *(case[name] for name in TRAINING))
        for own, case in zip(exact, cases, strict=True)
    ]
    missing = {key: case for key, case in zip(keys, cases, strict=True) if key not in _references}
    trained = (
        [one_process(case) for case in missing.values()]
        if plain
        else on_team(on_ranks, 1, ([{**case, **ALONE} for case in missing.values()],))[0]
    )
    _references.update(zip(missing, trained, strict=True))
    return [_references[key] for key in keys]


def far(
    ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], within: float = 1e-6
) -> list[str]:
    """The names of tensors that differ."""
    assert ours.keys() == theirs.keys()
    names = []
    for name, tensor in ours.items():
        pair = (tensor, theirs[name])
        if tensor.is_complex():
            pair = (torch.view_as_real(pair[0]), torch.view_as_real(pair[1]))
        if not zoo.distance(*pair) <= within:
            names.append(name)
    return names


def differences(case: Case, rank: Trained, expected: Trained) -> list[str]:
    """What differs by more than rounding. Half precision rounds a second step's forward elsewhere,
    and bfloat16 parameters have gradients that round in every addition.
    """
    names: list[str] = []
    if case["update"] == "replicated":
        within = 3e-2 if case["precision"] == "bf16" else 1e-6
        names += far(rank.gradients, expected.gradients, within)
    if case["precision"] == "fp32":
        if case["update"] == "replicated":
            names += far(rank.tail, expected.tail)
        names += far(rank.weights, expected.weights)
        if rank.losses != pytest.approx(expected.losses, rel=1e-6):
            names.append("losses")
        if case["clip"] is not None and rank.norms != pytest.approx(expected.norms, rel=1e-5):
            names.append("norms")
    # the gradient of a bias before BatchNorm is rounding, and the mean holds the bias
    noise = {"conv.bias", "norm.running_mean"} if case["net"] == "everything" else set()
    return [name for name in names if name not in noise]


def check(cases: Sequence[Case], workers: int) -> None:
    chosen = [case for case in cases if case["workers"] == workers]
    plain = [case for case in chosen if case["net"] != "everything"]
    own = [case for case in chosen if case["net"] == "everything" or case["exact"]]
    trained = list(zip(*on_team(on_ranks, workers, (chosen,)), strict=True))
    wrong = []
    for asked, is_plain in ((plain, True), (own, False)):
        for case, expected in zip(asked, references(asked, plain=is_plain), strict=True):
            for rank, result in enumerate(trained[chosen.index(case)]):
                names = differences(case, result, expected)
                if case["exact"] and not is_plain and result.bits != expected.bits:
                    names.append("bits")
                if names:
                    wrong.append((names, rank, case))
    for case, ranks in zip(chosen, trained, strict=True):
        if len({rank.bits for rank in ranks}) > 1:
            wrong.append((["ranks"], 0, case))
    assert not wrong, "\n".join(map(str, wrong))


@pytest.mark.parametrize("workers", AXES["workers"])
def test_ranks_train_as_one_process(workers: int) -> None:
    check(pairwise(), workers)


@pytest.mark.rest
@pytest.mark.parametrize("workers", AXES["workers"])
def test_ranks_train_as_one_process_by_every_method(workers: int) -> None:
    check(product(), workers)


def test_without_exact_mode_the_bits_depend_on_the_ranks() -> None:
    """Else the comparison of bits would prove nothing."""
    case = {name: values[0] for name, values in AXES.items()}
    (one,), (eight, *_) = (on_team(on_ranks, workers, ([case],)) for workers in (1, 8))
    assert one[0].bits != eight[0].bits


def in_half(world: lockstep.World, reduce: str) -> dict[str, Tensor]:
    case = {**BFLOAT, "reduce": reduce}
    return on_a_rank(world, case).gradients


BFLOAT = {name: values[0] for name, values in AXES.items()} | {"net": "mlp", "precision": "bf16"}


@pytest.mark.parametrize(("workers", "reduce"), [(2, "native"), (3, "central")])
def test_bfloat16_gradients_are_added_rank_by_rank(workers: int, reduce: str) -> None:
    """A sum rounds to 8 bits in each addition, so it equals a process that adds in this order."""
    x, y = zoo.samples(SAMPLES)
    cut = Plan(samples=SAMPLES, global_batch=GLOBAL, micro_batch=4, drop_last=False).cut(0)
    total: dict[str, Tensor] = {}
    for rank in range(workers):
        model = build(BFLOAT)
        for slot in cut.filled(rank, workers):
            where = list(cut.positions(slot))
            loss_of(BFLOAT, model, x[where], y[where]).backward()
        for name, gradient in gradients(model).items():
            total[name] = total[name] + gradient if name in total else gradient
    expected = {name: gradient / (GLOBAL / 3) for name, gradient in total.items()}
    for ours in on_team(in_half, workers, (reduce,)):
        assert {gradient.dtype for gradient in ours.values()} == {torch.bfloat16}
        assert not far(ours, expected)
