"""Check a Stepper's options, and build the reducer and the update for its parallelism method."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import get_args

from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel

from lockstep.checks.identity import weights
from lockstep.checks.nonfinite import NonFiniteTrace
from lockstep.checks.start import compare_start, model_fields, optimizer_fields
from lockstep.checks.trainable import check_trained
from lockstep.checks.unused import UnusedCheck, shortly
from lockstep.collectives.group import Group
from lockstep.config import knob
from lockstep.config.parallelism import Parallelism
from lockstep.config.task import UNUSED, SchedulerPer, Unused
from lockstep.data.loader import Loader
from lockstep.errors import LockstepWarning, UsageError
from lockstep.gradients.compression import compressed
from lockstep.gradients.compression.power_sgd import check_matrices
from lockstep.gradients.exact import exact_reducer
from lockstep.gradients.layout import BUCKET
from lockstep.gradients.reducer import Reducer
from lockstep.gradients.reductions import Alone, reduction
from lockstep.gradients.running_statistics import MovingBuffers, replicate
from lockstep.step.data_parallel import DistributedDataParallel
from lockstep.step.model_shard import ModelShard
from lockstep.step.step_result import allow_scheduler
from lockstep.step.wrapper_arguments import Checks, check_checks
from lockstep.updates.local_steps import LocalSteps
from lockstep.updates.replicated import Replicated
from lockstep.updates.server.worker import ServerUpdate
from lockstep.updates.sharded import Sharded
from lockstep.updates.update import Update, Updated
from lockstep.world.world import World


@dataclass(frozen=True, slots=True, kw_only=True)
class StepperOptions:
    """The arguments of a Stepper that never change; the docstring of Stepper explains them."""

    clip: float | None
    scaler: GradScaler | None
    scheduler: LRScheduler | None
    scheduler_per: SchedulerPer
    seed: int
    bucket_mb: float | None
    unused: Unused
    average: AveragedModel | None
    checks: Checks
    trace_nonfinite: bool

    def __post_init__(self) -> None:
        if self.clip is not None and not self.clip > 0:  # inf is allowed: it only measures the norm
            raise UsageError(
                "wrong-value", name="clip", value=self.clip, expected="a number above 0"
            )
        knob.chosen("unused", self.unused, UNUSED)
        knob.chosen("scheduler_per", self.scheduler_per, get_args(SchedulerPer))
        if self.scheduler is None and self.scheduler_per != "step":
            raise UsageError("no-scheduler", scheduler_per=self.scheduler_per)
        check_checks(self.checks)

    @property
    def scales(self) -> bool:
        """Whether an enabled GradScaler scales the losses."""
        return self.scaler is not None and self.scaler.is_enabled()

    def check(self, method: Parallelism) -> None:
        """Raise a UsageError if an option cannot be combined with `method`."""
        if self.average is not None and method.alone:
            raise UsageError("average-does-not-fit", option=_step_alone_option(method))
        if method.server and self.unused == "skip":
            raise UsageError("skip-at-a-server")
        if method.alone and self.scales:
            raise UsageError("loss-scaler-does-not-fit", option=_step_alone_option(method))
        if method.compression is not None and method.compression.owes and self.scales:
            raise UsageError("loss-scaler-does-not-fit", option=f"compress={method.compress!r}")

    def check_models(self, model: nn.Module, world: World) -> None:
        """Raise a UsageError for a model or average that cannot be trained, and copy rank 0's
        average to all ranks.
        """
        if not isinstance(model, DistributedDataParallel):
            check_trained(model, world.device)
        if self.average is not None:
            check_trained(self.average, world.device)
            replicate(self.average.module, world.group)

    def compare(self, model: nn.Module, optimizer: Optimizer, alike: Group) -> None:
        """Raise ReplicaDivergence if the ranks of `alike` start from different set-ups. For a
        wrapped model the ranks are those of its group.
        """
        if self.checks == "off":
            return
        if isinstance(model, DistributedDataParallel):
            alike = model.group
            fields = model_fields(model.module, model.ignored)
        else:
            fields = model_fields(model)
        options = {"clip": self.clip, "seed": self.seed}
        compare_start(alike, {**fields, **optimizer_fields(optimizer), **options})

    def averaged(self) -> list[tuple[str, Tensor]]:
        """The tensors of the averaged model, under the names that replica comparisons use."""
        named = {} if self.average is None else weights(self.average.module)
        return [(f"average of {name}", tensor) for name, tensor in named.items()]


@dataclass(slots=True, kw_only=True)
class Assembly:
    """The parts of a Stepper that are built anew with each reducer."""

    model: nn.Module
    reducer: Reducer
    shard: ModelShard
    facts_group: Group
    """The ranks that exchange the facts of a step: all, or only this rank if it steps alone."""
    update: Update
    buffers: MovingBuffers
    unused: UnusedCheck
    trace: NonFiniteTrace
    forgotten: str
    """The names of trainable parameters that the optimizer does not hold; "" for none. Their
    gradients are summed in every step, but never applied.
    """

    def warn_of_forgotten(self, stacklevel: int) -> None:
        if self.forgotten:
            warnings.warn(
                f"the optimizer does not hold {self.forgotten}: their gradients are summed, and"
                " never applied. Give them to the optimizer, or freeze them",
                LockstepWarning,
                stacklevel=stacklevel,
            )

    def follow_model(self, world: World) -> None:
        """Look up the buffers again: layers were added, replaced or frozen."""
        self.buffers.restore()
        self.buffers = _buffers_of(self.model, self.reducer, world)


def _buffers_of(model: nn.Module, reducer: Reducer, world: World) -> MovingBuffers:
    return MovingBuffers(model, reducer.group, world.device, reducer.generation)


def assemble(
    model: nn.Module,
    optimizer: Optimizer,
    method: Parallelism,
    options: StepperOptions,
    *,
    alone: bool,
    shard: ModelShard,
    everyone: Group,
    world: World,
) -> Assembly:
    """Attach a reducer and an update to the model. `alone`: from now on this rank steps without
    the others. A Stepper can begin with alone=False and change later (post-local SGD).
    """
    if method.alone and options.scheduler is not None:
        allow_scheduler(optimizer)
    reducer, bare = reducer_of(
        model, method, options.bucket_mb, shard.replicas(everyone), alone=alone
    )
    reducer.guard(adds_in_place=shard.mesh is None)
    optimized: set[int] = set()
    for group in optimizer.param_groups:
        optimized.update(map(id, group["params"]))
    forgotten = [
        name
        for name, parameter in zip(reducer.names, reducer.parameters, strict=True)
        if id(parameter) not in optimized
    ]
    updated = Updated(
        world=world,
        everyone=everyone,
        model=bare,
        reducer=reducer,
        optimizer=optimizer,
        scheduler=options.scheduler,
        scaler=options.scaler,
        clip=options.clip,
        norm=shard.norm,
    )
    return Assembly(
        model=bare,
        reducer=reducer,
        shard=shard,
        facts_group=reducer.group if alone else everyone,
        update=update_of(method, updated, alone=alone),
        buffers=_buffers_of(bare, reducer, world),
        unused=UnusedCheck(reducer, options.unused),
        trace=NonFiniteTrace(reducer, always=options.trace_nonfinite),
        forgotten=shortly(forgotten) if forgotten else "",
    )


def update_of(method: Parallelism, updated: Updated, *, alone: bool) -> Update:
    """Return a new update of the class that `method` selects."""
    if alone and method.local is not None:
        assert method.sync_every is not None
        return LocalSteps(updated, method.sync_every, method.local)
    if method.server:
        return ServerUpdate(updated, method.bound)
    if method.update == "sharded":
        return Sharded(updated, method.weights)
    return Replicated(updated)


def check_drawn(loader: object, method: Parallelism, everyone: Group) -> None:
    """Raise a UsageError if `loader` cannot hand out slots dynamically."""
    if not isinstance(loader, Loader):
        raise UsageError("slots-cannot-be-drawn", kind=type(loader).__name__)
    if loader.balance is not None:
        loader.balance.check(method, everyone.size)


def reducer_of(
    model: nn.Module, method: Parallelism, bucket_mb: float | None, group: Group, *, alone: bool
) -> tuple[Reducer, nn.Module]:
    """Return a reducer that sums gradients over `group`, and the bare module. `alone`: this rank
    steps with its own gradients, and the reduction is used only when replicas synchronize.
    """
    if bucket_mb is not None:
        knob.number("bucket_mb", bucket_mb, above=0)
    if isinstance(model, DistributedDataParallel):
        _check_wrapped(method, bucket_mb)
        return model.give_up_reducer(), model.module
    replicate(model, group)
    bucket_bytes = BUCKET if bucket_mb is None else int(bucket_mb * 2**20)
    if method.exact:
        return exact_reducer(model, method.reduce, group, bucket_bytes), model
    if method.compression is None:
        chosen = reduction("native" if method.server else method.reduce, group)
    else:
        check_matrices(method.compression, model, group.ranks[group.rank])
        chosen = compressed(method.compression, group)
    if not alone:
        return Reducer(model, group, chosen, bucket_bytes=bucket_bytes), model
    if method.local is not None and method.local.fragments > 1:
        # fragments consist of whole buckets
        octets = sum(
            parameter.nbytes for parameter in model.parameters() if parameter.requires_grad
        )
        bucket_bytes = max(1, min(bucket_bytes, octets // method.local.fragments))
    own = Alone(chosen)
    if method.server:
        own.name = "messages"
    return Reducer(model, group.alone(), own, bucket_bytes=bucket_bytes), model


def _step_alone_option(method: Parallelism) -> str:
    """Return the option that makes ranks step alone, as text for an error."""
    return f"sync_every={method.sync_every}" if method.local else f"update={method.update!r}"


def _check_wrapped(method: Parallelism, bucket_mb: float | None) -> None:
    """Raise a UsageError for options that the reducer of a wrapped model does not support."""
    if method.alone or method.compress is not None:
        option = _step_alone_option(method)
        if method.compress:
            option = f"compress={method.compress!r}"
        raise UsageError("needs-bare-module", option=option)
    if method.exact:
        raise UsageError("needs-bare-module", option="exact=True")
    if bucket_mb is not None:
        raise UsageError(
            "set-on-the-wrapper", name="bucket_mb", value=bucket_mb, keyword="bucket_cap_mb"
        )
    if method.reduce != "auto":
        raise UsageError("set-on-the-wrapper", name="reduce", value=method.reduce, keyword="reduce")
