"""The ways to take one training step of a task: a loop of one's own, that loop around torch's, Accelerate's, Fabric's and our DDP, a Stepper.

Each has a model, an optimizer and a scheduler of its own, built alike. A loop around a DDP is what a careful user writes: gradients are
kept back until the last micro-batch (`no_sync`), and the sum of losses is scaled so that the mean over ranks is the mean over the global batch.
"""

from __future__ import annotations

import importlib
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lockstep import randomness
from lockstep.collectives.shared_memory.operations import possible
from lockstep.data_parallel import DistributedDataParallel
from lockstep.errors import TaskError, UsageError
from lockstep.measure import others
from lockstep.measure.given import Given
from lockstep.stepper import Stepper
from lockstep.task import Precision, Task
from lockstep.training.build import Length, model_of, optimizer_of, scheduler_of
from lockstep.training.forward import Forward, grad_scaler
from lockstep.world import World

_MB = 25.0  # torch's own bucket
CHOICES = (
    "local, ddp:MB, accelerate:MB, fabric:MB (the size of a bucket), wrapper:native, wrapper:shared, "
    "stepper:native, stepper:shared, stepper:sharded"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """What all ways have in common."""

    task: Task
    world: World
    precision: Precision
    steps: int
    """Optimizer steps that will be taken: what a scheduler is told."""
    keyed: bool
    """Seed what a forward draws by (seed, step, micro-batch), as a Stepper does, so that all ways draw alike."""


class Way(ABC):
    """`way(given)` takes one optimizer step on one window."""

    def __init__(self, setting: Setting) -> None:
        self.setting, task, device = setting, setting.task, setting.world.device
        randomness.shared(task.seed)
        self.model = model_of(task).to(device)
        if task.compile:
            self.model.compile()
        self.optimizer = optimizer_of(task, self.model)
        self.scheduler = scheduler_of(task, self.optimizer, Length(task.epochs, setting.steps))
        self.scaler = grad_scaler(setting.precision, device)
        threads = torch.get_num_threads()
        self.wrapped: Any = self.wrap()
        torch.set_num_threads(threads)  # Accelerate and Fabric set their own; all ways have equally many
        self.forward = Forward(self.wrapped, task, setting.precision, device)

    def wrap(self) -> nn.Module:
        """What is called in place of the model. Not called by anyone else."""
        return self.model

    @abstractmethod
    def __call__(self, given: Given) -> None: ...

    def loss(self, batch: Any) -> tuple[Tensor, float | Tensor]:
        return self.forward.loss(self.forward(batch), batch)


class Loop(Way):
    """The usual loop. By itself, without a wrapper, it communicates with nobody."""

    def __call__(self, given: Given) -> None:
        self.optimizer.zero_grad()
        last = len(given.batches) - 1
        for place, batch in enumerate(given.batches):
            if self.setting.keyed:
                randomness.step(self.setting.task.seed, given.window.step, given.window.slots[place])
            with nullcontext() if place == last else self.kept_back():
                self.backward(self.loss(batch)[0] * self.scale(given))
        self.update()

    def scale(self, given: Given) -> float:
        """By which the sum of losses is multiplied, before it is differentiated."""
        return 1 / given.own

    def kept_back(self) -> AbstractContextManager[object]:
        """While gradients only pile up on this rank."""
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        (self.scaler.scale(loss) if self.scaler is not None else loss).backward()

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
    """The usual loop around a wrapper that averages the gradients over the ranks in the last backward of a step."""

    def scale(self, given: Given) -> float:
        return self.setting.world.size / given.whole

    def kept_back(self) -> AbstractContextManager[object]:
        kept: AbstractContextManager[object] = self.wrapped.no_sync()
        return kept


class TorchDDP(Averaged):
    """torch.nn.parallel.DistributedDataParallel, gradients views of its buckets."""

    def __init__(self, setting: Setting, megabytes: float) -> None:
        self.megabytes = megabytes
        super().__init__(setting)

    def wrap(self) -> nn.Module:
        device = self.setting.world.device
        devices = [device] if device.type == "cuda" else None
        return nn.parallel.DistributedDataParallel(
            self.model, device_ids=devices, gradient_as_bucket_view=True, bucket_cap_mb=self.megabytes
        )


class ByAccelerate(TorchDDP):
    """accelerate.Accelerator().prepare(model, optimizer), with the same DDP inside."""

    def wrap(self) -> nn.Module:
        package = importlib.import_module("accelerate")
        options = package.DistributedDataParallelKwargs(gradient_as_bucket_view=True, bucket_cap_mb=self.megabytes)
        cpu = self.setting.world.device.type == "cpu"
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "OMP_NUM_THREADS", UserWarning)  # how many threads it sets, which do not stay
            self.accelerator = package.Accelerator(cpu=cpu, mixed_precision="no", kwargs_handlers=[options])
        wrapped, self.optimizer = self.accelerator.prepare(self.model, self.optimizer)
        return wrapped  # type: ignore[no-any-return]

    def kept_back(self) -> AbstractContextManager[object]:
        kept: AbstractContextManager[object] = self.accelerator.no_sync(self.wrapped)
        return kept

    def backward(self, loss: Tensor) -> None:
        self.accelerator.backward(loss)


class ByFabric(TorchDDP):
    """Lightning Fabric's DDPStrategy, with the same DDP inside."""

    def wrap(self) -> nn.Module:
        package = others.installed("fabric")
        assert package is not None
        fabric = importlib.import_module(package)
        strategies = importlib.import_module(f"{package}.strategies")
        environments = importlib.import_module(f"{package}.plugins.environments")
        world = self.setting.world
        strategy = strategies.DDPStrategy(
            cluster_environment=environments.TorchElasticEnvironment(),  # reads RANK, LOCAL_RANK and WORLD_SIZE, which ranks have
            gradient_as_bucket_view=True,
            bucket_cap_mb=self.megabytes,
        )
        self.fabric = fabric.Fabric(accelerator=world.device.type, devices=world.size, strategy=strategy)
        self.fabric.launch()
        wrapped, self.optimizer = self.fabric.setup(self.model, self.optimizer)
        return wrapped  # type: ignore[no-any-return]

    def kept_back(self) -> AbstractContextManager[object]:
        kept: AbstractContextManager[object] = self.fabric.no_backward_sync(self.wrapped)
        return kept

    def backward(self, loss: Tensor) -> None:
        self.fabric.backward(loss)


class Wrapped(Averaged):
    """lockstep.DistributedDataParallel in the same loop."""

    def __init__(self, setting: Setting, reduce: str) -> None:
        self.reduce = reduce
        super().__init__(setting)

    def wrap(self) -> nn.Module:
        return DistributedDataParallel(self.model, reduce=self.reduce, world=self.setting.world)


class Stepped(Way):
    """A lockstep.Stepper, as `lockstep train` drives it."""

    def __init__(self, setting: Setting, reduce: str, update: str) -> None:
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
            world=setting.world,
        )

    def __call__(self, given: Given) -> None:
        for batch in self.stepper.micro_batches(given.window):
            loss, weight = self.loss(batch)
            self.stepper.backward(loss, weight)
        self.stepper.step()


def build(names: list[str], setting: Setting) -> dict[str, Way]:
    """A way for each name, each with a model of its own. Raises UsageError for an unknown name, TaskError where models are shared."""
    found: dict[str, Way] = {}
    for name in names:
        found[name] = maker(name)(setting)
        if len({id(way.model) for way in found.values()}) < len(found):
            raise TaskError("Task: model returned the model that it had returned before: have it build a new one each time it is called")
    return found


def maker(name: str) -> Callable[[Setting], Way]:
    """How a name's way is made. Raises UsageError, with the choices, for an unknown name."""
    kind, colon, rest = name.partition(":")
    with_bucket = {"ddp": TorchDDP, "accelerate": ByAccelerate, "fabric": ByFabric}
    if kind in with_bucket and (megabytes := _megabytes(rest) if colon else _MB):
        return partial(with_bucket[kind], megabytes=megabytes)
    without: Mapping[str, Callable[[Setting], Way]] = {
        "local": Loop,
        "wrapper:native": partial(Wrapped, reduce="native"),
        "wrapper:shared": partial(Wrapped, reduce="shared_memory"),
        "stepper:native": partial(Stepped, reduce="native", update="replicated"),
        "stepper:shared": partial(Stepped, reduce="shared_memory", update="replicated"),
        "stepper:sharded": partial(Stepped, reduce="auto", update="sharded"),
    }
    if name not in without:
        raise UsageError(f"variant {name!r} is unknown: choose some of {CHOICES}")
    return without[name]


def _megabytes(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0 < value < float("inf") else None


def why_not(name: str, workers: int, device: str, precision: Precision) -> str | None:
    """Why this way cannot be measured here, in words; None where it can."""
    kind, _, rest = name.partition(":")
    if kind in others.PACKAGES and others.installed(kind) is None:
        return f"{others.PACKAGES[kind][0]} is not installed: pip install {others.PACKAGES[kind][0]}"
    if kind in others.PACKAGES and precision == "fp16":
        return "it brings a loss scale of its own, which is not the one that the others have with fp16"
    if rest == "shared" and device == "cuda":
        return "ranks on GPUs do not share the host's memory"
    if rest == "shared" and not possible():
        return "gradients are shared on x86 Linux only"
    if rest == "shared" and workers == 1:
        return "one rank has nobody to share memory with"
    return None


def import_for(name: str) -> None:
    """Import what this way needs, and what a first optimizer imports: the code of a library is not the memory of a step."""
    package = others.installed(name.partition(":")[0])
    if package is not None:
        importlib.import_module(package)
    torch.optim.AdamW([torch.zeros(1, requires_grad=True)]).step()
