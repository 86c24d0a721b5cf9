"""Training at a parameter server: with a bound of 0 the numbers of the replicated update,
without one every sample still once.
"""

from __future__ import annotations

import linecache
import math
import threading
import warnings
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import IterableDataset, TensorDataset

import lockstep
from lockstep.errors import UsageError, WorkerFailed
from lockstep.testing import run_ranks, slow_at

SAMPLES = 44


def data() -> TensorDataset:
    x = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, (x.sum(1) > 0).long() + (x[:, 0] > 1).long(), torch.arange(SAMPLES))


def net(*, norm: bool = False) -> nn.Module:
    torch.manual_seed(0)
    middle = [nn.BatchNorm1d(60)] if norm else []
    return nn.Sequential(
        nn.Linear(6, 40),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Linear(40, 60),
        *middle,
        nn.ReLU(),
        nn.Linear(60, 3),
    )


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


class Trained:
    """What a rank has seen."""

    def __init__(self, stepper: lockstep.Stepper, scheduler: Any) -> None:
        self.weights = [
            each.detach().clone()
            for each in (*stepper.model.parameters(), *stepper.model.buffers())
        ]
        self.steps, self.rates = stepper.steps, scheduler.get_last_lr()
        self.seen: list[tuple[int, int]] = []
        self.windows: list[Any] = []


def train(
    world: lockstep.World,
    make: Any = momentum,
    *,
    epochs: int = 2,
    micro_batch: int = 2,
    clip: float | None = 0.5,
    norm: bool = False,
    save: Path | None = None,
    loader_workers: int = 0,
    slow: float = 0.0,
    **method: Any,
) -> Trained:
    if slow:
        slow_at(1, 1, "forward", slow)
    model = net(norm=norm)
    optimizer = make(model)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
    stepper = lockstep.Stepper(model, optimizer, clip=clip, scheduler=scheduler, **method)
    loader = lockstep.Loader(
        data(), global_batch=10, micro_batch=micro_batch, num_workers=loader_workers
    )
    stepper.draws(loader)
    checkpoints = None
    if save is not None:
        checkpoints = lockstep.Checkpoints(save, stepper, loader, every=3, keep=99)
        checkpoints.resume()
    seen, windows = [], []
    for epoch in loader.epochs(epochs):
        for window in epoch:
            for x, y, numbers in stepper.micro_batches(window):
                seen += [(epoch.number, number) for number in numbers.tolist()]
                stepper.backward(F.cross_entropy(model(x), y, reduction="sum"), weight=len(y))
            result = stepper.step()
            windows += result.windows
            if checkpoints is not None:
                assert checkpoints.step() <= result.synchronized
        if "update" in method:
            assert result.synchronized
    if checkpoints is not None:
        checkpoints.wait()  # as if it were killed: close() would save the end
    trained = Trained(stepper, scheduler)
    trained.seen, trained.windows = seen, windows
    return trained


def apart(one: Trained, other: Trained) -> float:
    return max((a - b).abs().max().item() for a, b in zip(one.weights, other.weights, strict=True))


SYNCHRONOUS: list[tuple[Any, dict[str, Any]]] = [
    (momentum, {}),
    (adamw, {}),
    (adamw, {"clip": None}),
    (momentum, {"micro_batch": 5}),  # more ranks than slots; the last window has one
]


def train_with_each(
    world: lockstep.World, updates: Sequence[str | None]
) -> dict[str | None, list[Trained]]:
    method = {
        update: {} if update is None else {"update": update, "staleness": 0} for update in updates
    }
    return {
        update: [train(world, make, **changes, **method[update]) for make, changes in SYNCHRONOUS]
        for update in updates
    }


@cache
def synchronous(workers: int) -> list[dict[str | None, list[Trained]]]:
    """By rank: ranks start once for all cases."""
    updates = (None, "server") if workers == 1 else ("server",)
    return run_ranks(train_with_each, workers, args=(updates,))


@pytest.mark.parametrize("case", range(len(SYNCHRONOUS)))
def test_without_staleness_it_is_synchronous_training(case: int) -> None:
    plain = synchronous(1)[0][None][case]
    for workers in (1, 2, 3, 4):
        everyone = [found["server"][case] for found in synchronous(workers)]
        for each in everyone:
            assert apart(each, plain) < 1e-6, workers
            assert (each.steps, each.rates) == (plain.steps, plain.rates)
            assert apart(each, everyone[0]) == 0
        assert [window.age for window in everyone[0].windows] == [0] * plain.steps
        assert sorted(seen for each in everyone for seen in each.seen) == sorted(plain.seen)


@pytest.mark.parametrize("staleness", ["inf", 1])
@pytest.mark.parametrize("workers", [2, 4])
def test_with_staleness_every_sample_still_counts_once(workers: int, staleness: int | str) -> None:
    everyone = run_ranks(
        train,
        workers,
        kwargs={"epochs": 3, "norm": True, "update": "server", "staleness": staleness, "slow": 0.1},
    )
    expected = [(epoch, number) for epoch in range(3) for number in range(SAMPLES)]
    assert sorted(seen for each in everyone for seen in each.seen) == expected
    first = everyone[0]
    assert sorted(window.step for window in first.windows) == list(range(15))
    assert [
        sum(window.samples_by_rank[rank] for window in first.windows) for rank in range(workers)
    ] == [len(each.seen) for each in everyone]
    # at the end, statistics of BatchNorm too
    assert all(apart(each, first) == 0 for each in everyone)
    assert all(each.steps == 15 and each.rates == first.rates for each in everyone)
    if staleness == "inf":
        assert max(window.age for window in first.windows) > 0
        assert len(everyone[1].seen) < 3 * SAMPLES / workers


def test_loader_workers_fetch_what_was_drawn() -> None:
    (plain,) = run_ranks(train, 1, kwargs={"epochs": 1})
    everyone = run_ranks(
        train, 2, kwargs={"epochs": 1, "update": "server", "staleness": 0, "loader_workers": 1}
    )
    assert apart(everyone[1], plain) < 1e-6


@cache
def undisturbed() -> Trained:
    (plain,) = run_ranks(train, 1, kwargs={"make": adamw, "epochs": 3})
    return plain


@pytest.mark.parametrize(("workers", "later"), [(2, 3), (3, 1), (1, 2)])
def test_a_checkpoint_goes_on_at_any_number_of_ranks(
    tmp_path: Path, workers: int, later: int
) -> None:
    how = {"make": adamw, "update": "server", "staleness": 0, "norm": False}
    plain = undisturbed()
    # saves after step 3 of 5
    run_ranks(train, workers, kwargs={**how, "save": tmp_path, "epochs": 1})
    again, *_ = run_ranks(train, later, kwargs={**how, "save": tmp_path, "epochs": 3})
    assert again.windows[0].step == 3
    assert again.steps == plain.steps
    assert apart(again, plain) < 1e-6
    assert again.rates == pytest.approx(plain.rates)


def fails_in_a_thread(optimizer: Any, args: Any, kwargs: Any) -> None:
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("not in this thread")


def failing(world: lockstep.World, where: str) -> None:
    model = net()
    optimizer = momentum(model)
    if where == "server":
        optimizer.register_step_pre_hook(fails_in_a_thread)
    stepper = lockstep.Stepper(model, optimizer, update="server", staleness="inf")
    loader = lockstep.Loader(data(), global_batch=10, micro_batch=2)
    stepper.draws(loader)
    for window in (window for epoch in loader.epochs(5) for window in epoch):
        for x, y, _ in stepper.micro_batches(window):
            if where == "loop" and world.rank == 1 and window.epoch == 1:
                raise RuntimeError("on purpose")
            stepper.backward(F.cross_entropy(model(x), y, reduction="sum"), weight=len(y))
        stepper.step()


@pytest.mark.parametrize(
    ("where", "said"), [("loop", "on purpose"), ("server", "not in this thread")]
)
def test_what_fails_on_a_rank_is_told(where: str, said: str) -> None:
    with pytest.raises(WorkerFailed, match=said):
        run_ranks(failing, 3, args=(where,))


def refused(world: lockstep.World, what: str) -> str:
    model = net()
    try:
        if what == "optimizer":
            lockstep.Stepper(model, torch.optim.Adafactor(model.parameters()), update="server")
        elif what == "unused":
            lockstep.Stepper(model, momentum(model), update="server", unused="skip")
        elif what == "wrapper":
            wrapped = lockstep.DistributedDataParallel(model)
            lockstep.Stepper(wrapped, momentum(model), update="server")
        else:
            stepper = lockstep.Stepper(model, momentum(model), update="server")
            if what == "list":
                list(stepper.micro_batches([torch.randn(2, 6)]))
            elif what == "stream":
                stepper.draws(lockstep.Loader(Stream(), global_batch=4, micro_batch=2))
            elif what == "share":
                (epoch,) = lockstep.Loader(data(), global_batch=10, micro_batch=2).epochs(1)
                list(stepper.micro_batches(next(iter(epoch))))
            elif what in ("synchronize", "save"):
                loader = lockstep.Loader(data(), global_batch=10, micro_batch=2)
                stepper.draws(loader)
                (epoch,) = loader.epochs(1)
                next(iter(epoch))
                if what == "save":
                    lockstep.Checkpoints("never", stepper, loader).save()
                stepper.synchronize()
    except UsageError as error:
        return str(error)
    return "nothing was said"


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        yield torch.zeros(6)


def refused_each(world: lockstep.World, cases: Sequence[str]) -> dict[str, str]:
    return {what: refused(world, what) for what in cases}


def test_what_cannot_work_is_refused() -> None:
    words = {
        "optimizer": "[optimizer-not-elementwise]",
        "unused": "[skip-at-a-server]",
        "wrapper": "[needs-bare-module]",
        "list": "[slots-not-drawn]",
        "share": "[slots-not-drawn]",
        "stream": "[slots-cannot-be-drawn]",
        "save": "Checkpoints.save() was called while the workers' models differ",
        "synchronize": "Stepper.synchronize() was called while the workers' models differ",
    }
    (found,) = run_ranks(refused_each, 1, args=([*words],))
    for what, said in words.items():
        assert said in found[what], what


def skipped(world: lockstep.World) -> tuple[list[tuple[int, str]], bool, list[str]]:
    """The losses of window 1 are not numbers."""
    model = net()
    stepper = lockstep.Stepper(model, momentum(model), update="server", staleness=0)
    loader = lockstep.Loader(data(), global_batch=10, micro_batch=2)
    stepper.draws(loader)
    windows: list[Any] = []
    lines: list[str] = []
    for window in (window for epoch in loader.epochs(1) for window in epoch):
        for x, y, _ in stepper.micro_batches(window):
            stepper.backward(
                F.cross_entropy(model(x), y, reduction="sum")
                * (math.nan if window.step == 1 else 1),
                weight=len(y),
            )
        with warnings.catch_warnings(record=True, action="always") as said:
            windows += stepper.step().windows
        lines += [
            linecache.getline(each.filename, each.lineno).strip()
            for each in said
            if "step 2 was skipped" in str(each.message)
        ]
    whole = all(bool(each.isfinite().all()) for each in model.parameters())
    return [(each.step, each.reason) for each in windows if each.reason], whole, lines


def test_a_window_whose_loss_is_nan_is_left_out() -> None:
    everyone = run_ranks(skipped, 2)
    assert everyone[0][0] == [
        (1, "the loss is not finite: this update would make every weight nan")
    ]
    assert everyone[0][1]
    assert everyone[1][1]
    # a warning shows the user's own line
    assert everyone[0][2] == ["windows += stepper.step().windows"]
    assert not everyone[1][2]


def threads_of(world: lockstep.World) -> tuple[int, int]:
    """While it serves, and after the world was closed."""
    train(world, update="server", staleness="inf", epochs=1)
    during = sum("lockstep server" in each.name for each in threading.enumerate())
    world.close()
    return during, sum("lockstep server" in each.name for each in threading.enumerate())


def test_no_thread_is_left_when_the_world_has_closed() -> None:
    assert run_ranks(threads_of, 3) == [(2, 0), (0, 0), (0, 0)]
