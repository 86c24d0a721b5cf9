"""Training at a parameter server: with a bound of 0 as replicated, else every sample still once."""

from __future__ import annotations

import linecache
import math
import threading
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset, TensorDataset

import lockstep
from lockstep.errors import WorkerFailed
from lockstep.testing import run_ranks
from tests import zoo
from tests.refused import refused
from tests.step.walking import same
from tests.teams import on_team

SAMPLES, WINDOWS = 44, 5  # windows of an epoch; the last holds 4 samples


def data() -> TensorDataset:
    x = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, (x.sum(1) > 0).long() + (x[:, 0] > 1).long(), torch.arange(SAMPLES))


def loader_of(**options: Any) -> lockstep.Loader:
    return lockstep.Loader(data(), **{"global_batch": 10, "micro_batch": 2, **options})


def net(*, norm: bool = False) -> nn.Module:
    torch.manual_seed(0)
    middle = [nn.BatchNorm1d(60)] if norm else []
    layers = [nn.Linear(6, 40), nn.ReLU(), nn.Dropout(0.2), nn.Linear(40, 60), *middle]
    return nn.Sequential(*layers, nn.ReLU(), nn.Linear(60, 3))


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


@dataclass
class Trained:
    """What a rank has seen."""

    weights: list[Tensor]
    steps: int
    rates: list[float]
    seen: list[tuple[int, int]]
    windows: list[Any]


def train(
    world: lockstep.World,
    make: Any = momentum,
    *,
    epochs: int = 2,
    clip: float | None = 0.5,
    norm: bool = False,
    save: Path | None = None,
    hold: Path | None = None,
    loader: dict[str, Any] | None = None,
    **method: Any,
) -> Trained:
    """With `hold`, a file, rank 1 keeps its first draw until rank 0 is in a later window."""
    model = net(norm=norm)
    optimizer = make(model)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
    stepper = lockstep.Stepper(model, optimizer, clip=clip, scheduler=scheduler, **method)
    source = loader_of(**loader or {})
    stepper.draws(source)
    checkpoints = None
    if save is not None:
        checkpoints = lockstep.Checkpoints(save, stepper, source, every=3, keep=99)
        checkpoints.resume()
    seen: list[tuple[int, int]] = []
    windows: list[Any] = []
    for epoch in source.epochs(epochs):
        for window in epoch:
            for x, y, numbers in stepper.micro_batches(window):
                if hold is not None and world.rank == 1 and not seen:
                    wait_for_a_later_window(hold, window.step)
                seen += [(epoch.number, number) for number in numbers.tolist()]
                stepper.backward(zoo.loss_sum(model(x), y), weight=len(y))
            result = stepper.step()
            windows += result.windows
            if hold is not None and world.rank == 0:
                hold.write_text(f"{window.step} ")
            if checkpoints is not None:
                assert checkpoints.step() <= result.synchronized
        if "update" in method:
            assert result.synchronized
    if checkpoints is not None:
        checkpoints.wait()  # as if it were killed: close() would save the end
    source.close()
    values = [value.detach().clone() for value in (*model.parameters(), *model.buffers())]
    return Trained(values, stepper.steps, scheduler.get_last_lr(), seen, windows)


def wait_for_a_later_window(file: Path, step: int) -> None:
    def latest() -> int:
        text = file.read_text() if file.exists() else ""
        return int(text) if text.endswith(" ") else -1

    while step < WINDOWS - 1 and latest() <= step:
        time.sleep(0.001)


def apart(one: Trained, other: Trained) -> float:
    return max((a - b).abs().max().item() for a, b in zip(one.weights, other.weights, strict=True))


@pytest.mark.parametrize(
    ("make", "how", "sizes"),
    [
        (momentum, {}, (1, 2, 3, 8)),
        (adamw, {}, (2,)),
        (adamw, {"clip": None}, (3,)),
        # more ranks than slots; the last window has one
        (momentum, {"loader": {"micro_batch": 5}}, (1, 3)),
    ],
)
def test_without_staleness_it_is_synchronous_training(
    make: Any, how: dict[str, Any], sizes: tuple[int, ...]
) -> None:
    (plain,) = on_team(train, 1, (make,), how)
    for workers in sizes:
        ranks = on_team(train, workers, (make,), {**how, "update": "server", "staleness": 0})
        for rank in ranks:
            assert apart(rank, plain) < 1e-6, workers
            assert (rank.steps, rank.rates) == (plain.steps, plain.rates)
            assert same(rank.weights, ranks[0].weights)
        assert [window.age for window in ranks[0].windows] == [0] * plain.steps
        assert sorted(chain.from_iterable(rank.seen for rank in ranks)) == sorted(plain.seen)


@pytest.mark.parametrize(("workers", "staleness"), [(2, "inf"), (2, 1), (3, "inf"), (3, 1)])
def test_with_staleness_every_sample_still_counts_once(
    workers: int, staleness: int | str, tmp_path: Path
) -> None:
    how = {"epochs": 3, "norm": True, "hold": tmp_path / "step"}
    ranks = on_team(train, workers, (), {**how, "update": "server", "staleness": staleness})
    expected = [(epoch, number) for epoch in range(3) for number in range(SAMPLES)]
    assert sorted(chain.from_iterable(rank.seen for rank in ranks)) == expected
    first = ranks[0]
    assert sorted(window.step for window in first.windows) == list(range(3 * WINDOWS))
    for number, rank in enumerate(ranks):
        samples = sum(window.samples_by_rank[number] for window in first.windows)
        assert samples == len(rank.seen)
        # at the end, statistics of BatchNorm too
        assert same(rank.weights, first.weights)
        assert (rank.steps, rank.rates) == (3 * WINDOWS, first.rates)
    assert max(window.age for window in first.windows) > 0


def test_loader_workers_fetch_what_was_drawn() -> None:
    (plain,) = on_team(train, 1, (), {"epochs": 1})
    method = {"update": "server", "staleness": 0, "loader": {"num_workers": 1}}
    ranks = on_team(train, 2, (), {"epochs": 1, **method})
    assert apart(ranks[1], plain) < 1e-6


@cache
def undisturbed() -> Trained:
    (plain,) = on_team(train, 1, (), {"make": adamw, "epochs": 3})
    return plain


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 1), (1, 2)])
def test_a_checkpoint_resumes_at_any_number_of_ranks(
    tmp_path: Path, before: int, after: int
) -> None:
    how = {"make": adamw, "update": "server", "staleness": 0, "save": tmp_path}
    on_team(train, before, (), {**how, "epochs": 1})  # saves after step 3 of 5
    resumed, *_ = on_team(train, after, (), {**how, "epochs": 3})
    plain = undisturbed()
    assert resumed.windows[0].step == 3
    assert resumed.steps == plain.steps
    assert apart(resumed, plain) < 1e-6
    assert resumed.rates == pytest.approx(plain.rates)


def fails_in_a_thread(optimizer: Any, args: Any, kwargs: Any) -> None:
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("not in this thread")


def failing(world: lockstep.World, where: str) -> None:
    model = net()
    optimizer = momentum(model)
    if where == "server":
        optimizer.register_step_pre_hook(fails_in_a_thread)
    stepper = lockstep.Stepper(model, optimizer, update="server", staleness="inf")
    loader = loader_of()
    stepper.draws(loader)
    for window in chain.from_iterable(loader.epochs(5)):
        for x, y, _ in stepper.micro_batches(window):
            if where == "loop" and world.rank == 1 and window.epoch >= 1:
                raise RuntimeError("on purpose")
            stepper.backward(zoo.loss_sum(model(x), y), weight=len(y))
        stepper.step()


@pytest.mark.parametrize(
    ("where", "message"), [("loop", "on purpose"), ("server", "not in this thread")]
)
def test_what_fails_on_a_rank_is_named(where: str, message: str) -> None:
    with pytest.raises(WorkerFailed, match=message):
        run_ranks(failing, 3, args=(where,))


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        yield torch.zeros(6)


def test_what_cannot_work_is_refused() -> None:
    def stepper_of(model: nn.Module, optimizer: Any = None, **options: Any) -> lockstep.Stepper:
        optimizer = optimizer or momentum(model)
        return lockstep.Stepper(model, optimizer, update="server", **options)

    with lockstep.init(backend="gloo"):
        model = net()
        with refused("optimizer-not-elementwise"):
            stepper_of(model, torch.optim.Adafactor(model.parameters()))
        with refused("skip-at-a-server"):
            stepper_of(model, unused="skip")
        with refused("needs-bare-module"):
            stepper_of(lockstep.DistributedDataParallel(net()))
        stepper = stepper_of(model)
        with refused("slots-not-drawn"):
            list(stepper.micro_batches([torch.randn(2, 6)]))
        with refused("slots-not-drawn"):
            list(stepper.micro_batches(next(chain.from_iterable(loader_of().epochs(1)))))
        with refused("slots-cannot-be-drawn"):
            stepper.draws(lockstep.Loader(Stream(), global_batch=4, micro_batch=2))
        loader = loader_of()
        stepper.draws(loader)
        next(chain.from_iterable(loader.epochs(1)))
        with refused("workers-not-together", call="Checkpoints.save()"):
            lockstep.Checkpoints("never", stepper, loader).save()
        with refused("workers-not-together", call="Stepper.synchronize()"):
            stepper.synchronize()


def skipped(world: lockstep.World) -> tuple[list[tuple[int, str]], bool, list[str]]:
    """The losses of window 1 are not numbers."""
    model = net()
    stepper = lockstep.Stepper(model, momentum(model), update="server", staleness=0)
    loader = loader_of()
    stepper.draws(loader)
    windows: list[Any] = []
    lines: list[str] = []
    for window in chain.from_iterable(loader.epochs(1)):
        for x, y, _ in stepper.micro_batches(window):
            factor = math.nan if window.step == 1 else 1.0
            stepper.backward(zoo.loss_sum(model(x), y) * factor, weight=len(y))
        with warnings.catch_warnings(record=True, action="always") as caught:
            windows += stepper.step().windows
        lines += [
            linecache.getline(warning.filename, warning.lineno).strip()
            for warning in caught
            if "step 2 was skipped" in str(warning.message)
        ]
    finite = all(bool(parameter.isfinite().all()) for parameter in model.parameters())
    return [(window.step, window.reason) for window in windows if window.reason], finite, lines


def test_a_window_whose_loss_is_nan_is_left_out() -> None:
    (reasons, finite, lines), (_, also_finite, other_lines) = on_team(skipped, 2)
    assert reasons == [(1, "the loss is not finite: this update would make every weight nan")]
    assert finite
    assert also_finite
    # a warning shows the user's own line
    assert lines == ["windows += stepper.step().windows"]
    assert not other_lines


def threads_of(world: lockstep.World) -> list[int]:
    """The server's threads while it serves, and after the world was closed."""
    model = net()
    lockstep.Stepper(model, momentum(model), update="server", staleness="inf")
    during = [thread.name for thread in threading.enumerate()]
    world.close()
    after = [thread.name for thread in threading.enumerate()]
    return [sum("lockstep server" in name for name in names) for names in (during, after)]


def test_no_thread_is_left_when_the_world_has_closed() -> None:
    assert run_ranks(threads_of, 3) == [[2, 0], [0, 0], [0, 0]]
