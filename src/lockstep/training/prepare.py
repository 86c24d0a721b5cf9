"""`lockstep.prepare`: the loop that people have becomes data-parallel.

model, optimizer, loader, scheduler = lockstep.prepare(
    model, optimizer, loader, scheduler, micro_batch=32
)
for epoch in loader.epochs(10):
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader

from lockstep.config import knob
from lockstep.config.parallelism import Parallelism
from lockstep.data.from_dataloader import from_dataloader, is_shuffled
from lockstep.errors import UsageError
from lockstep.step.gates import gate_scaler
from lockstep.step.own_loop import Trained
from lockstep.step.stepper import Stepper
from lockstep.training.prepared_loader import PreparedLoader, Reduction
from lockstep.world.world import World

_SHUFFLED = "lockstep: shuffle=True: the order is the keyed permutation of seed={seed}, on any number of ranks"
_NO_OPTIONS = {"objects", "options", "model", "optimizer", "method", "mesh"}
"""Parameters of `prepare` and of the Stepper that are no options of a prepared loop."""


def prepare(
    *objects: Any,
    micro_batch: int | None = None,
    seed: int = 0,
    reduction: Reduction = "mean",
    weight: Callable[[Any], float] | None = None,
    backwards: int | Sequence[int] = 1,
    run: Path | str | None = None,
    checkpoint_every: int | None = None,
    keep: int | str | None = None,
    **options: Any,
) -> Any:
    """Make the loop that you have data-parallel.

    Args:
        objects: models, optimizers, a DataLoader, schedulers, a GradScaler, in any order. Models
            without an optimizer, dicts, and other objects with `state_dict` and `load_state_dict`
            are saved with the run; their state must be equal on all ranks.
        micro_batch: samples of a forward.
        seed: of the shuffle, of samples and of forwards.
        reduction: what a loss is: the "mean" over a micro-batch, its "sum", or a sum that is not
            divided ("as is").
        weight: returns what the loss of a batch is a mean over, such as its number of tokens.
            Default: its samples. `lockstep.weigh` gives it in the loop.
        backwards: backwards of a micro-batch that reach the model; with several optimizers one
            number for each, in their order.
        run: a folder for checkpoints and metrics. A training that is there is resumed.
        checkpoint_every: steps between two checkpoints. Default: as often as costs less than 2 % of
            the time.
        keep: number of newest checkpoints to keep, or "all". Default: thinned by age, as by
            `lockstep.Checkpoints`.
        options: those of `lockstep.Stepper`.

    Returns:
        The same objects, in the order given; the DataLoader as a `PreparedLoader`.
    """
    names = [*inspect.signature(prepare).parameters, *inspect.signature(Stepper).parameters]
    known = {*names, *knob.knobs(Parallelism)} - _NO_OPTIONS
    knob.known(sorted(known), options, "lockstep.prepare")
    kinds: dict[str, list[Any]] = {kind: [] for kind in _KINDS}
    for one in objects:
        kinds[_kind_of(one)].append(one)
    models, optimizers, loaders, schedulers, others = kinds.values()
    scaler = options.pop("scaler", None)
    if scaler is not None:
        others.append(scaler)
    for kind in ("model", "optimizer", "DataLoader"):
        if not kinds[kind]:
            raise UsageError("nothing-to-prepare", what=kind)
    if run is not None and len(loaders) > 1:
        raise UsageError("several-run-loaders", count=len(loaders))
    counts = [backwards] * len(optimizers) if isinstance(backwards, int) else list(backwards)
    if len(counts) != len(optimizers):
        expected = f"one number for each of the {len(optimizers)} optimizers"
        raise UsageError("wrong-value", name="backwards", value=backwards, expected=expected)
    of_model = [_model_of(optimizer, models) for optimizer in optimizers]
    opened = []
    for one in loaders:
        opened.append(from_dataloader(one, micro_batch=micro_batch, seed=seed))
        if is_shuffled(one) and World.current().rank == 0:
            print(_SHUFFLED.format(seed=seed), file=sys.stderr)
    others += [model for model in models if not _is_trained(model, optimizers)]
    trained = []
    for model, optimizer, count in zip(of_model, optimizers, counts, strict=True):
        trainee = Trained(model, optimizer, count, seed=seed, **options)
        trained.append(trainee)
        for scheduler in schedulers:
            if scheduler.optimizer is optimizer:
                trainee.schedulers.add(scheduler)
    for one in others:
        if isinstance(one, torch.amp.GradScaler):
            gate_scaler(one, trained)
    prepared: dict[int, Any] = {}
    for one, loader in zip(loaders, opened, strict=True):
        prepared[id(one)] = PreparedLoader(
            loader, trained, seed=seed, reduction=reduction, weight=weight
        )
        if run is not None:
            prepared[id(one)].save_in(
                run, schedulers=schedulers, others=others, every=checkpoint_every, keep=keep
            )
    results = tuple(prepared.get(id(one), one) for one in objects)
    return results[0] if len(results) == 1 else results


_KINDS: dict[str, Any] = {
    "model": nn.Module,
    "optimizer": Optimizer,
    "DataLoader": DataLoader,
    "scheduler": (LRScheduler, ReduceLROnPlateau),
    "object with a state": object,
}


def _kind_of(one: object) -> str:
    kind = next(kind for kind, types in _KINDS.items() if isinstance(one, types))
    stateful = hasattr(one, "state_dict") and hasattr(one, "load_state_dict")
    stateful = stateful or type(one) is dict
    if kind == "object with a state" and not stateful:
        raise UsageError("cannot-prepare", kind=type(one).__name__)
    return kind


def _model_of(optimizer: Optimizer, models: Sequence[nn.Module]) -> nn.Module:
    """Return the model, or the models together, whose parameters the optimizer has."""
    found = [model for model in models if _is_trained(model, [optimizer])]
    if not found:
        raise UsageError("optimizer-of-other-models")
    return found[0] if len(found) == 1 else nn.ModuleList(found)


def _is_trained(model: nn.Module, optimizers: Sequence[Optimizer]) -> bool:
    """Whether one of the optimizers has a parameter of the model."""
    own = {id(parameter) for parameter in model.parameters()}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            if any(id(parameter) in own for parameter in group["params"]):
                return True
    return False
