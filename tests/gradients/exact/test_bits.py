"""Exact mode: one SHA-256 of weights, buffers, optimizer state and logged losses at any number
of ranks, by any carrier, with either update.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, IterableDataset, TensorDataset

import lockstep
from lockstep.errors import LateGradient, UsageError, WorkerFailed
from lockstep.testing import run_ranks
from tests.refused import refused


class Net(nn.Module):
    """BatchNorm, dropout, a bias before BatchNorm (its gradient is rounding and nothing else), a
    tied and a 0-d parameter, one not always used.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 6, 3)
        self.norm = nn.BatchNorm2d(6)
        self.drop = nn.Dropout(0.3)
        self.inner = nn.Linear(6 * 16, 6 * 16)
        self.tied = nn.Linear(6 * 16, 6 * 16)
        self.tied.weight = self.inner.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.seldom = nn.Parameter(torch.ones(700))
        self.head = nn.Linear(6 * 16, 10)

    def forward(self, x: Tensor) -> Tensor:
        y = self.drop(F.relu(self.norm(self.conv(x)))).flatten(1)
        y = self.tied(F.relu(self.inner(y))) * self.scale
        if x[0, 0, 0, 0] > 0:
            y = y + self.seldom.sum() * 1e-3
        out: Tensor = self.head(y)
        return out


def images(count: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    return TensorDataset(
        torch.randn(count, 1, 6, 6, generator=generator),
        torch.randint(0, 10, (count,), generator=generator),
    )


OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
}


def trained(world: lockstep.World, options: dict[str, Any]) -> tuple[str, list[int]]:
    """A digest of everything after some steps with short last ones, and the slots that this rank
    computed in the first.
    """
    given = {
        "slots": 8,
        "optimizer": "adamw",
        "reduce": "auto",
        "update": "replicated",
        "clip": 0.05,
        "autocast": False,
        "bf16": False,
        "balance": None,
        "epochs": 2,
    } | options
    torch.manual_seed(0)
    model = Net().to(torch.bfloat16 if given["bf16"] else torch.float32)
    optimizer = OPTIMIZERS[given["optimizer"]](model.parameters())
    stepper = lockstep.Stepper(
        model,
        optimizer,
        clip=given["clip"],
        reduce=given["reduce"],
        update=given["update"],
        exact=True,
        unused="zeros",
        world=world,
    )
    loader = lockstep.Loader(
        images(75), global_batch=4 * given["slots"], micro_batch=4, seed=1, balance=given["balance"]
    )
    digest = hashlib.sha256()
    slots: list[int] = []
    for epoch in loader.epochs(given["epochs"]):
        for window in epoch:
            slots = slots or list(window.slots)
            for x, y in stepper.micro_batches(window):
                with torch.autocast("cpu", torch.bfloat16, enabled=given["autocast"]):
                    out = model(x.to(torch.bfloat16) if given["bf16"] else x).float()
                    loss = F.cross_entropy(out, y, reduction="sum")
                stepper.backward(loss, weight=len(y) / 3)
            result = stepper.step()
            digest.update(
                repr(
                    (
                        result.loss,
                        result.weight,
                        None if result.norm is None else float(result.norm),
                    )
                ).encode()
            )
    loader.close()
    state = stepper.optimizer_state_dict()["state"]
    for tensor in (
        *model.state_dict().values(),
        *(each[name] for each in state.values() for name in sorted(each)),
    ):
        if isinstance(tensor, Tensor):
            digest.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest(), slots


def all_trained(world: lockstep.World, ways: list[dict[str, Any]]) -> list[tuple[str, list[int]]]:
    return [trained(world, options) for options in ways]


def digests(size: int, *ways: dict[str, Any]) -> list[str]:
    """Of a training for each of `ways`, one after the other on the same ranks."""
    found = []
    for options, ranks in zip(
        ways, zip(*run_ranks(all_trained, size, args=(list(ways),)), strict=True), strict=True
    ):
        assert len({digest for digest, _ in ranks}) == 1, f"the ranks differ: {options}"
        assert sorted(slot for _, slots in ranks for slot in slots) == list(
            range(options.get("slots", 8))
        ), options
        found.append(ranks[0][0])
    return found


@pytest.fixture(scope="module")
def alone() -> str:
    """The digest of one process with no options."""
    return digests(1, {})[0]


def test_any_number_of_ranks_gives_the_same_bits(alone: str) -> None:
    assert {size: digests(size, {}) for size in (2, 3, 4, 5, 8)} == {
        size: [alone] for size in (2, 3, 4, 5, 8)
    }


def test_also_where_slots_are_no_power_of_two_and_some_ranks_idle() -> None:
    assert len({digests(size, {"slots": 6})[0] for size in (1, 2, 3, 5, 7)}) == 1


def test_the_carrier_and_the_update_do_not_matter() -> None:
    optimizers = [{"optimizer": optimizer} for optimizer in OPTIMIZERS]
    expected = digests(1, *optimizers)
    for size, carriers in (
        (2, [("native", "replicated"), ("shared_memory", "sharded"), ("native", "sharded")]),
        (3, [("native", "replicated"), ("shared_memory", "sharded")]),
    ):
        for reduce, update in carriers:
            found = digests(
                size, *({**options, "reduce": reduce, "update": update} for options in optimizers)
            )
            assert found == expected, (size, reduce, update)


@pytest.mark.parametrize("update", ["replicated", "sharded"])
@pytest.mark.parametrize("reduce", ["native", "shared_memory"])
def test_nor_does_it_matter_who_computes_how_many(reduce: str, update: str, alone: str) -> None:
    """Uneven shares, with nothing for rank 0, which has slot 0 otherwise; and shares that need
    high stacks of blocks.
    """
    shares = ("2,1,1", "0,1,1", "7,0,1", "0,1,7")
    ways = [{"balance": share, "reduce": reduce, "update": update} for share in shares]
    assert digests(3, *ways) == [alone] * len(shares)


def test_in_other_precisions_and_without_clipping() -> None:
    options: list[dict[str, Any]] = [{"autocast": True}, {"bf16": True}, {"clip": None}]
    expected = digests(1, *options)
    for size, more in ((2, {"reduce": "native"}), (3, {}), (4, {})):
        assert digests(size, *({**each, **more} for each in options)) == expected, size


def test_without_exact_the_bits_do_depend_on_the_ranks() -> None:
    """Else this file would prove nothing."""
    assert len({run_ranks(ordinary, size)[0] for size in (1, 4)}) == 2


def ordinary(world: lockstep.World) -> Tensor:
    torch.manual_seed(0)
    model = nn.Linear(36, 10)
    stepper = lockstep.Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1), world=world)
    for epoch in lockstep.Loader(images(64), global_batch=32, micro_batch=4).epochs(1):
        for window in epoch:
            for x, y in stepper.micro_batches(window):
                stepper.backward(
                    F.cross_entropy(model(x.flatten(1)), y, reduction="sum"), weight=len(y)
                )
            stepper.step()
    return hashlib.sha256(model.weight.detach().numpy().tobytes()).hexdigest()  # type: ignore[return-value]


# -- what it is combined with --------------------------------------------------------------------


def model_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(36, 10)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def refusals(world: lockstep.World) -> list[tuple[str, str]]:
    found = []
    model, optimizer = model_and_optimizer()
    for options in ({"reduce": "central"}, {"reduce": "hierarchical"}, {"reduce": "ring"}):
        with pytest.raises(UsageError) as caught:
            lockstep.Stepper(model, optimizer, exact=True, world=world, **options)  # type: ignore[arg-type]
        found.append((caught.value.code, str(caught.value).partition(":")[0]))
    with pytest.raises(UsageError) as caught:
        lockstep.Stepper(
            lockstep.DistributedDataParallel(model), optimizer, exact=True, world=world
        )
    found.append((caught.value.code, str(caught.value).partition(":")[0]))
    stepper = lockstep.Stepper(*model_and_optimizer(), exact=True, world=world)
    with pytest.raises(UsageError) as caught:
        next(iter(stepper.micro_batches([images(4)[:]])))
    found.append((caught.value.code, str(caught.value).partition(":")[0]))
    for loader in (
        lockstep.Loader(images(64), batch_per_rank=8),
        lockstep.Loader(images(64), global_batch=8),
        lockstep.Loader(Stream(), global_batch=8, micro_batch=2, sharding="dataset"),
    ):
        for epoch in loader.epochs(1):
            for window in epoch:
                with pytest.raises(UsageError) as caught:
                    next(iter(stepper.micro_batches(window)))
                found.append((caught.value.code, str(caught.value).partition(":")[0]))
                break
            break
    return found


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(images(64))


def test_what_cannot_be_exact_is_refused() -> None:
    for found in (run_ranks(refusals, 1)[0], *run_ranks(refusals, 2)):
        assert found[:3] == [
            ("exact-with-reduce", f"reduce={reduce!r} with exact=True")
            for reduce in ("central", "hierarchical", "ring")
        ]
        assert found[3][0] == "needs-bare-module"
        assert [code for code, _ in found[4:]] == [
            "exact-without-slots",
            *["exact-cut-by-ranks"] * 3,
        ]
        assert "a list has no slots" in found[4][1]


def on_a_stream(world: lockstep.World) -> list[float]:
    torch.manual_seed(0)
    model, optimizer = model_and_optimizer()
    stepper = lockstep.Stepper(model, optimizer, exact=True, world=world)
    for epoch in lockstep.Loader(Stream(), global_batch=20, micro_batch=3).epochs(1):
        for window in epoch:
            for x, y in stepper.micro_batches(window):
                stepper.backward(
                    F.cross_entropy(model(x.flatten(1)), y, reduction="sum"), weight=len(y)
                )
            stepper.step()
    weights: list[float] = model.weight.flatten().tolist()
    return weights


def test_streams_are_exact_too() -> None:
    expected = run_ranks(on_a_stream, 1)[0]
    for size in (2, 3):
        assert all(found == expected for found in run_ranks(on_a_stream, size))


def settings_of_the_process(world: lockstep.World) -> list[Any]:
    def now() -> tuple[Any, ...]:
        return (
            torch.get_num_threads(),
            torch.are_deterministic_algorithms_enabled(),
            torch.backends.cudnn.benchmark,
        )

    torch.set_num_threads(2)
    torch.backends.cudnn.benchmark = True
    before = now()
    lockstep.Stepper(*model_and_optimizer(), exact=True, world=world)
    during = now()
    world.close()
    return [before, during, now()]


def test_the_process_computes_deterministically_until_the_world_closes() -> None:
    assert run_ranks(settings_of_the_process, 1) == [
        [(2, False, True), (1, True, False), (2, False, True)]
    ]


def nondeterministic(world: lockstep.World) -> None:
    model, optimizer = model_and_optimizer()
    stepper = lockstep.Stepper(model, optimizer, exact=True, world=world)
    for epoch in lockstep.Loader(images(8), global_batch=8, micro_batch=4).epochs(1):
        for window in epoch:
            for x, y in stepper.micro_batches(window):
                out = model(x.flatten(1))
                torch.empty(3).put_(torch.tensor([0, 0]), torch.ones(2))
                stepper.backward(F.cross_entropy(out, y, reduction="sum"), weight=len(y))
            stepper.step()


def test_a_nondeterministic_operation_is_refused_by_name() -> None:
    with pytest.raises(WorkerFailed, match="put_"):
        run_ranks(nondeterministic, 2)


# -- edges ---------------------------------------------------------------------------------------


class Some(Dataset[Tensor]):
    def __len__(self) -> int:
        return 3

    def __getitem__(self, number: int) -> Tensor:
        return torch.full((36,), number + 1.0)


def broken_off(world: lockstep.World) -> list[float]:
    """Every rank leaves its loop after one micro-batch: the others are absent."""
    torch.manual_seed(0)
    model, optimizer = model_and_optimizer()
    stepper = lockstep.Stepper(model, optimizer, exact=True, world=world)
    for epoch in lockstep.Loader(images(64), global_batch=32, micro_batch=4).epochs(1):
        for window in epoch:
            for x, y in stepper.micro_batches(window):
                stepper.backward(
                    F.cross_entropy(model(x.flatten(1)), y, reduction="sum"), weight=len(y)
                )
                break
            stepper.step()
    weights: list[float] = model.weight.flatten().tolist()
    return weights


def test_a_loop_that_is_left_early_counts_what_it_walked() -> None:
    ranks = run_ranks(broken_off, 2)
    assert ranks[0] == ranks[1]
    torch.manual_seed(0)
    model, optimizer = model_and_optimizer()
    for epoch in lockstep.Loader(images(64), global_batch=32, micro_batch=4, rank=0, size=1).epochs(
        1
    ):
        for window in epoch:
            optimizer.zero_grad()
            (x, y), (z, w) = window[0], window[4]
            F.cross_entropy(model(torch.cat([x, z]).flatten(1)), torch.cat([y, w])).backward()
            optimizer.step()
    torch.testing.assert_close(
        torch.tensor(ranks[0]), model.weight.flatten().detach(), rtol=1e-5, atol=1e-6
    )


def fewer_samples_than_ranks(world: lockstep.World) -> list[float]:
    torch.manual_seed(0)
    model, optimizer = model_and_optimizer()
    stepper = lockstep.Stepper(model, optimizer, exact=True, world=world)
    for epoch in lockstep.Loader(Some(), global_batch=8, micro_batch=1).epochs(2):
        for window in epoch:
            for x in stepper.micro_batches(window):
                stepper.backward(model(x).square().sum(), weight=len(x))
            stepper.step()
    weights: list[float] = model.weight.flatten().tolist()
    return weights


def test_more_ranks_than_samples() -> None:
    expected = run_ranks(fewer_samples_than_ranks, 1)[0]
    for size in (2, 5):
        assert all(found == expected for found in run_ranks(fewer_samples_than_ranks, size))


def cleared(world: lockstep.World) -> None:
    model, optimizer = model_and_optimizer()
    stepper = lockstep.Stepper(model, optimizer, exact=True, world=world)
    for epoch in lockstep.Loader(images(64), global_batch=32, micro_batch=4).epochs(1):
        for window in epoch:
            for x, y in stepper.micro_batches(window):
                stepper.backward(
                    F.cross_entropy(model(x.flatten(1)), y, reduction="sum"), weight=len(y)
                )
            # of the user's own, when the gradients belong to the sum
            model(x.flatten(1)).sum().backward()
            with refused("gradient-cleared"):
                stepper.step()
            return
    raise AssertionError


def test_a_backward_of_ones_own_before_the_step_is_an_error() -> None:
    run_ranks(cleared, 1)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(36, 36)

    def forward(self, x: Tensor) -> Tensor:
        from torch.utils.checkpoint import checkpoint

        x = x.requires_grad_()
        for _ in range(2):
            x = checkpoint(self.inner, x, use_reentrant=True)
        return x


def lands_twice(world: lockstep.World) -> None:
    model = Twice()
    stepper = lockstep.Stepper(
        model, torch.optim.SGD(model.parameters(), lr=0.1), exact=True, world=world
    )
    for epoch in lockstep.Loader(images(64), global_batch=32, micro_batch=4).epochs(1):
        for window in epoch:
            for x, _ in stepper.micro_batches(window):
                with refused("second-gradient-in-micro-batch", LateGradient):
                    stepper.backward(model(x.flatten(1)).sum(), weight=4)
                return
    raise AssertionError


def test_two_gradients_of_one_parameter_in_a_micro_batch_are_refused() -> None:
    run_ranks(lands_twice, 1)
