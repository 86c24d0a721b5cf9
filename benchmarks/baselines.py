"""Variants of one training step of a task: a plain loop, this loop around torch's DDP or Lockstep's
DistributedDataParallel, and a Stepper. All get the same few windows, which are fetched and weighed
before anything is timed.

Each has its own model, optimizer and scheduler, built alike. The loop around a DDP is what a
careful user writes: gradients are summed only in the last micro-batch (`no_sync`), and losses are
scaled so that the mean over ranks is the mean over the global batch.

This scale needs the sum of all weights before the first backward. A Stepper sends the weights with
the gradients; the other variants get the sum here at no cost.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.collectives.shared_memory.operations import possible
from lockstep.config import knob
from lockstep.config.task import Precision, Task
from lockstep.data.windows import Window
from lockstep.errors import UsageError
from lockstep.runtime import randomness
from lockstep.step.data_parallel import DistributedDataParallel
from lockstep.step.forward import Forward
from lockstep.step.stepper import Stepper
from lockstep.tools.verify.trace import random_states
from lockstep.training.build import Length, loader_of, model_of, optimizer_of, scheduler_of
from lockstep.training.opening import grad_scaler
from lockstep.world.world import World

WINDOWS = 4
"""Number of windows that the steps cycle through: the data changes from step to step, and all of it
fits into memory.
"""


@dataclass(frozen=True, slots=True)
class WeighedWindow:
    """One window with its weights, as one rank gets it."""

    window: Window
    batches: list[Any]
    """This rank's micro-batches, at least one."""
    own: float
    """The weight of this rank's micro-batches."""
    total: float
    """The weight of all ranks' micro-batches."""


@dataclass(frozen=True, slots=True)
class Feed:
    """The windows to cycle through, and facts about the task's steps."""

    given: Sequence[WeighedWindow]
    draws: bool
    """Whether a forward or its loss draws random numbers, as dropout does."""
    recipe: str
    """How the global batch is divided and shared among ranks, in words."""


def feed(task: Task, precision: Precision, world: World, *, weighed: bool = True) -> Feed:
    """Fetch the windows and compute their weights. All ranks call it. If not `weighed`, the weight
    of a window is its number of samples, and no model is built.

    Raises UsageError on all ranks if one has no micro-batch: torch's DDP would wait for it forever.
    """
    loader = loader_of(task, world)
    windows = list(_like_the_first(loader, world))
    if not windows:
        raise too_few(task, world.size)
    draws = False
    own = [float(window.samples) for window in windows]
    if weighed:
        draws, own = _weigh(task, precision, world, windows)
    sums = torch.tensor(own, dtype=torch.float64)
    world.control.all_reduce(sums).wait()
    totals = sums.tolist()
    if not all(total > 0 for total in totals):
        raise UsageError("window-without-weight", task=task.name, weight=min(totals))
    weighed_windows = []
    for window, weight, total in zip(windows, own, totals, strict=True):
        weighed_windows.append(WeighedWindow(window, list(window), weight, total))
    return Feed(weighed_windows, world.agree(draws), loader.describe())


def too_few(task: Task, workers: int) -> UsageError:
    """Return the error for a task that leaves some ranks without micro-batches."""
    return UsageError(
        "fewer-micro-batches-than-ranks",
        task=task.name,
        workers=workers,
        global_batch=task.global_batch,
        micro_batch=task.micro_batch,
    )


def _like_the_first(loader: Any, world: World) -> Iterator[Window]:
    """Yield up to WINDOWS windows of the first epoch in which every rank has as many micro-batches
    as in the first window, and at least one.
    """
    count = 0
    most = None
    for window in next(loader.epochs(1)):
        most = len(window) if most is None else most
        if world.agree(len(window) == most > 0, "all"):
            list(window)  # fetches the batches while the loader is open
            yield window
            count += 1
        if count == WINDOWS:
            return


def _weigh(
    task: Task, precision: Precision, world: World, windows: list[Window]
) -> tuple[bool, list[float]]:
    """Return whether a forward draws random numbers, and the weight of each window's micro-batches
    on this rank. It uses a model that is then discarded.
    """
    forward = Forward(model_of(task).to(world.device), task, precision, world.device)
    before = random_states(world.device)
    weights = []
    with torch.no_grad():
        for window in windows:
            total = 0.0
            for batch in window:
                _, weight = forward.loss(forward(batch), batch)
                total += float(weight)
            weights.append(total)
    return random_states(world.device) != before, weights


_MB = 25.0  # torch's default bucket size


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """Settings that all variants share."""

    task: Task
    world: World
    precision: Precision
    steps: int
    """Number of optimizer steps that will be taken: the length for the scheduler."""
    keyed: bool
    """Whether to seed each forward by (seed, step, micro-batch), as a Stepper does, so that all
    variants draw the same random numbers.
    """


class Baseline(ABC):
    """A variant of a training step. Calling it takes one optimizer step on one window."""

    def __init__(self, setting: Setting) -> None:
        task = setting.task
        device = setting.world.device
        self.setting = setting
        self.model = model_of(task).to(device)
        if task.compile:
            self.model.compile()
        self.optimizer = optimizer_of(task, self.model)
        self.scheduler = scheduler_of(task, self.optimizer, Length(task.epochs, setting.steps))
        self.scaler = grad_scaler(setting.precision, device)
        threads = torch.get_num_threads()
        self.wrapped: Any = self.wrap()
        torch.set_num_threads(threads)  # a wrapper may change it; all variants use the same number
        self.forward = Forward(self.wrapped, task, setting.precision, device)

    def wrap(self) -> nn.Module:
        """Return the module to call in place of the model. Only `__init__` calls this method."""
        return self.model

    @abstractmethod
    def __call__(self, weighed: WeighedWindow) -> None: ...

    def loss(self, batch: Any) -> tuple[Tensor, float | Tensor]:
        return self.forward.loss(self.forward(batch), batch)


class Loop(Baseline):
    """The usual training loop. Without a wrapper, it does not communicate."""

    def __call__(self, weighed: WeighedWindow) -> None:
        self.optimizer.zero_grad()
        seed = self.setting.task.seed
        last = len(weighed.batches) - 1
        for index, batch in enumerate(weighed.batches):
            if self.setting.keyed:
                randomness.step(seed, weighed.window.step, weighed.window.slots[index])
            with nullcontext() if index == last else self.kept_back():
                loss, _ = self.loss(batch)
                self.backward(loss * self.scale(weighed))
        self.update()

    def scale(self, weighed: WeighedWindow) -> float:
        """Return the factor for the sum of losses before the backward."""
        return 1 / weighed.own

    def kept_back(self) -> AbstractContextManager[object]:
        """Return a context in which gradients only accumulate on this rank."""
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        if self.scaler is not None:
            loss = self.scaler.scale(loss)
        loss.backward()

    def update(self) -> None:
        clip, scaler = self.setting.task.clip, self.scaler
        if clip is not None:
            if scaler is not None:
                scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), clip)
        if scaler is not None:
            scaler.step(self.optimizer)
            scaler.update()
        else:
            self.optimizer.step()
        if self.scheduler is not None and self.setting.task.scheduler_per == "step":
            self.scheduler.step()


class Averaged(Loop):
    """The usual training loop around a wrapper, which averages the gradients over the ranks in the
    last backward of a step.
    """

    def scale(self, weighed: WeighedWindow) -> float:
        return self.setting.world.size / weighed.total

    def kept_back(self) -> AbstractContextManager[object]:
        context: AbstractContextManager[object] = self.wrapped.no_sync()
        return context


class TorchDDP(Averaged):
    """The loop around torch.nn.parallel.DistributedDataParallel; gradients are views of its
    buckets.
    """

    def __init__(self, setting: Setting, megabytes: float) -> None:
        self.megabytes = megabytes
        super().__init__(setting)

    def wrap(self) -> nn.Module:
        device = self.setting.world.device
        devices = [device] if device.type == "cuda" else None
        return nn.parallel.DistributedDataParallel(
            self.model,
            device_ids=devices,
            gradient_as_bucket_view=True,
            bucket_cap_mb=self.megabytes,
        )


class Wrapped(Averaged):
    """The loop around lockstep.DistributedDataParallel."""

    def __init__(self, setting: Setting, reduce: str) -> None:
        self.reduce = reduce
        super().__init__(setting)

    def wrap(self) -> nn.Module:
        return DistributedDataParallel(self.model, reduce=self.reduce, world=self.setting.world)


class Stepped(Baseline):
    """A lockstep.Stepper, used as in `lockstep train`."""

    def __init__(self, setting: Setting, reduce: str, update: str, weights: str = "auto") -> None:
        super().__init__(setting)
        task = setting.task
        self.stepper = Stepper(
            self.model,
            self.optimizer,
            clip=task.clip,
            scaler=self.scaler,
            scheduler=self.scheduler if task.scheduler_per == "step" else None,
            seed=task.seed,
            unused=task.unused,
            reduce=reduce,
            update=update,
            weights=weights,
            world=setting.world,
        )

    def __call__(self, weighed: WeighedWindow) -> None:
        for batch in self.stepper.micro_batches(weighed.window):
            loss, weight = self.loss(batch)
            self.stepper.backward(loss, weight)
        self.stepper.step()


Wrappers = Mapping[str, Callable[[Setting, float], Baseline]]
"""Constructors of DDP variants by name; their argument `megabytes` is the bucket size."""
OURS: Mapping[str, Callable[[Setting], Baseline]] = {
    "local": Loop,
    "wrapper:auto": partial(Wrapped, reduce="auto"),
    "wrapper:native": partial(Wrapped, reduce="native"),
    "wrapper:shared": partial(Wrapped, reduce="shared_memory"),
    "stepper:auto": partial(Stepped, reduce="auto", update="replicated"),
    "stepper:native": partial(Stepped, reduce="native", update="replicated"),
    "stepper:shared": partial(Stepped, reduce="shared_memory", update="replicated"),
    "stepper:sharded": partial(Stepped, reduce="auto", update="sharded", weights="separate"),
    "stepper:weights": partial(Stepped, reduce="auto", update="sharded", weights="shared"),
}


def build(names: Sequence[str], setting: Setting, others: Wrappers) -> dict[str, Baseline]:
    """Build a variant for each name, each with its own model. Raises UsageError for an unknown
    name, ValueError if the task returns the same model twice.
    """
    built: dict[str, Baseline] = {}
    for name in names:
        variant = maker(name, others)(setting)
        if any(variant.model is other.model for other in built.values()):
            raise ValueError("the task returns the same model every time")
        built[name] = variant
    return built


def maker(name: str, others: Wrappers) -> Callable[[Setting], Baseline]:
    """Return the function that builds the variant `name`. `others`: more wrappers to compare.
    Raises UsageError with the choices for an unknown name.
    """
    if name in OURS:
        return OURS[name]
    kind, colon, rest = name.partition(":")
    wrappers: Wrappers = {"ddp": TorchDDP, **others}
    if kind not in wrappers:
        with_size = [f"{wrapper}:MB" for wrapper in wrappers]
        knob.chosen("variant", name, [*with_size, *OURS])
    size = knob.value_of(rest) if colon else _MB
    with knob.within(f"variant={name!r}"):
        megabytes = knob.number("bucket", size, above=0, unit="MB")
    return partial(wrappers[kind], megabytes=megabytes)  # type: ignore[call-arg]


def why_not(name: str, workers: int, device: str) -> str | None:
    """Return the reason why this variant cannot be measured here; None if it can."""
    if not name.endswith((":shared", ":weights")):
        return None
    if device == "cuda":
        return "ranks on GPUs do not share the host's memory"
    if workers == 1:
        return "one rank has nobody to share memory with"
    return None if possible() else "gradients are shared on x86 Linux only"
