"""Accelerate on Lockstep: `lockstep run --workers 2 train.py`.

    from lockstep.integrations.accelerate import LockstepAccelerator

    accelerator = LockstepAccelerator()          # in place of accelerate.Accelerator
    loader = lockstep.Loader(dataset, global_batch=64, micro_batch=8)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

It is a subclass. `prepare` turns a Loader into an iterable of batches. If all ranks are on one
host, torch's DDP averages gradients through shared memory. All else is Accelerate's.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from lockstep.checkpoints.manifest import believed
from lockstep.checks.divergence import ReplicaCheck
from lockstep.data.window_loader import WindowLoader
from lockstep.data.windows import Window
from lockstep.errors import UsageError
from lockstep.integrations.batches import RankBatches
from lockstep.runtime import extras, randomness, status
from lockstep.runtime.disk import write_whole
from lockstep.step.comm_hook import shared_memory_hook
from lockstep.world.world import World, init

try:
    from accelerate import Accelerator
    from accelerate.utils import (
        DDPCommunicationHookType,
        DistributedType,
        InitProcessGroupKwargs,
        recursively_apply,
    )
except ImportError as error:
    raise extras.missing(
        "lockstep.integrations.accelerate", f"Accelerate ({error})", "accelerate"
    ) from None
extras.warn_untested("accelerate", "1.15", "1.15")
_POSITIONS = "lockstep.json"
_TYPES = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)


class LockstepAccelerator(Accelerator):  # type: ignore[misc]  # Accelerate has no types
    """accelerate.Accelerator, with Lockstep's Loader. It takes the same arguments, by name. If the
    host has no accelerator, `cpu` defaults to True.

    A Loader given to `prepare` controls gradient accumulation. At the last micro-batch of a global
    batch, gradients are averaged over the ranks, and the optimizer and schedulers step. `backward`
    takes the mean loss of a batch; the gradient is that of the mean over the global batch. What
    the loop draws for a batch (dropout, noise) depends on the micro-batch and not on the rank.
    `save_state` and `load_state` keep the Loader's position. Replicas are compared after the first
    two steps, then every 100, before each save and in `end_training`. While LocalSGD or `no_sync`
    keeps them apart, they are not. `gather` takes unequal numbers of rows.

    Args:
        weigh: batch -> the number of items that its loss is a mean over, if these are not samples
            (for example, tokens). Ranks then wait for each other before each step's first
            micro-batch.
        options: Accelerate's arguments.

    Raises:
        UsageError: Accelerate sees another number of ranks than the launcher started; DeepSpeed,
            FSDP and other ways to divide a model; a stream that divides itself among the ranks.
        ReplicaDivergence: on all ranks, naming the parameter and the ranks.
    """

    def __init__(self, *, weigh: Callable[[Any], Any] | None = None, **options: Any) -> None:
        options.setdefault("cpu", not torch.accelerator.is_available())
        init_options = {}
        for handler in options.get("kwargs_handlers") or ():
            if isinstance(handler, InitProcessGroupKwargs):
                init_options = handler.to_kwargs()
        self.world: World = init(device="cpu" if options["cpu"] else None, **init_options)
        self.weigh = weigh
        self.trained: list[DistributedDataParallel] = []
        self._loaders: list[_LoaderBatches] = []
        self._schedulers: list[Any] = []
        self._check = ReplicaCheck()
        self._step = -1  # nothing has begun
        self._current: _LoaderBatches | None = None  # the loader that is iterated now
        # models that LocalSGD does not keep apart
        self._averaged: list[DistributedDataParallel] = []
        super().__init__(**options)
        check_ranks("Accelerate", self.num_processes, self.world)
        if self.distributed_type not in _TYPES or self.parallelism_config is not None:
            refuse("distributed_type", self.distributed_type, "use Accelerate's own class")
        self.register_save_state_pre_hook(self._save)
        self.register_load_state_pre_hook(self._load)

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Prepare as Accelerate does. A `lockstep.Loader` becomes an iterable of this rank's
        batches.

        Args:
            args: models, optimizers, loaders and schedulers.
            device_placement: as for Accelerate.
        """
        prepared = []
        for argument in args:
            if isinstance(argument, WindowLoader):
                argument = self._batches(argument)
            prepared.append(argument)
        return super().prepare(*prepared, device_placement=device_placement)

    def _batches(self, loader: WindowLoader[Any]) -> _LoaderBatches:
        steps = self.gradient_accumulation_steps
        if steps != 1:
            instead = "give the Loader global_batch and micro_batch"
            refuse("gradient_accumulation_steps", steps, instead)
        batches = _LoaderBatches(loader, self)
        self._loaders.append(batches)
        self._count_steps()
        return batches

    def prepare_model(self, model: nn.Module, *args: Any, **options: Any) -> nn.Module:
        prepared: nn.Module = super().prepare_model(model, *args, **options)
        if prepared is not model and isinstance(prepared, DistributedDataParallel):
            self.trained.append(prepared)
            hook = None if self.ddp_handler is None else self.ddp_handler.comm_hook
            if hook in (None, DDPCommunicationHookType.NO):
                share_memory(prepared, self.world)
        return prepared

    def prepare_scheduler(self, scheduler: Any) -> Any:
        prepared = super().prepare_scheduler(scheduler)
        self._schedulers.append(prepared)
        self._count_steps()
        return prepared

    def _count_steps(self) -> None:
        """Let schedulers step once a step. Accelerate's step once for each rank, for a global batch
        that grows with the number of ranks. A Loader's global batch does not grow.
        """
        if self._loaders:
            for scheduler in self._schedulers:
                scheduler.split_batches = True

    @contextmanager
    def accumulate(self, *models: nn.Module) -> Iterator[None]:
        """Accumulate as Accelerate does. While a Loader is iterated, the Loader decides instead.

        Args:
            models: as for Accelerate.
        """
        with super().accumulate(*models) if self._current is None else nullcontext():
            yield

    def backward(self, loss: Tensor, **options: Any) -> None:
        batches = self._current
        factor = 1.0
        if batches is not None:
            factor = batches.weight * self.num_processes / batches.total
        elif self.sync_gradients and self._synchronized():
            self.begin(self._step + 1)
        super().backward(loss * factor, **options)

    def gather(self, tensor: Any) -> Any:
        """Gather as Accelerate does. The ranks may have unequal numbers of rows.

        Args:
            tensor: as for Accelerate.
        """
        return gather_rows(super().gather, tensor)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather as Accelerate does. A copied batch of a Loader (weight 0) adds no rows.

        Args:
            input_data: as for Accelerate.
            use_gather_object: as for Accelerate.
        """
        if self._current is not None and not self._current.weight:
            input_data = without_rows(input_data)
            # Accelerate would take a list without objects for one of tensors
            use_gather_object |= isinstance(input_data, list) and not input_data
        return super().gather_for_metrics(input_data, use_gather_object)

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        if isinstance(dataloader, RankBatches):
            instead = "load_state has put the Loader where it was"
            refuse("skip_first_batches", num_batches, instead)
        return super().skip_first_batches(dataloader, num_batches)

    def free_memory(self, *objects: Any) -> Any:
        self.trained.clear()
        self._loaders.clear()
        self._schedulers.clear()
        return super().free_memory(*objects)

    def end_training(self) -> None:
        self.check_replicas("at the end of the training")
        super().end_training()

    def check_replicas(self, when: str) -> None:
        """Compare the weights of all ranks now, bit for bit. Every rank must call it. Models that
        LocalSGD or `no_sync` keeps apart are left out.

        Args:
            when: the first words of the error message.
        """
        alike = []
        for model in map(self.unwrap_model, self._synchronized()):
            alike.append((self.world.group, list(model.named_parameters())))
        self._check.compare(alike, self._step, when)

    def _synchronized(self) -> list[DistributedDataParallel]:
        return [model for model in self.trained if model.require_backward_grad_sync]

    def begin(self, step: int) -> None:
        """Begin step number `step`, counted from 0. Every rank calls it: at the first batch of a
        Loader's step, else at a backward that synchronizes.
        """
        self._step = step
        if step and self._synchronized() and self._check.due(step):
            self.check_replicas(f"after step {step}")
        status.step(step + 1)

    def walk(self, batches: _LoaderBatches) -> None:
        """Note that `batches` yields its next batch, and enter the batch's random stream."""
        if self._current is None:  # else the loop takes two loaders in turn
            self._averaged = self._synchronized()
            self._random_state = randomness.get_state()
        self._current = batches
        self.sync_gradients = batches.closes
        for model in self._averaged:
            model.require_backward_grad_sync = batches.closes
        randomness.step(batches.loader.recipe["seed"], batches.step, batches.slot)

    def leave(self, batches: _LoaderBatches) -> None:
        """Note that the loop is done with the batch of `batches`."""
        if self._current is batches:
            self._current = None
            self.sync_gradients = True
            for model in self._averaged:
                model.require_backward_grad_sync = True
            randomness.set_state(self._random_state)

    def _save(self, models: Any, weights: Any, folder: str) -> None:
        if not all(loader.closes for loader in self._loaders):
            raise UsageError("saved-inside-a-step")
        self.check_replicas("before a checkpoint")
        if self.is_main_process:
            positions = [loader.state_dict() for loader in self._loaders]
            write_whole(Path(folder, _POSITIONS), json.dumps(positions))

    def _load(self, models: Any, folder: str) -> None:
        file = Path(folder, _POSITIONS)
        positions = []
        with believed(file):
            if file.exists():
                positions = list(json.loads(file.read_text()))
        saved = len(positions)
        here = len(self._loaders)
        if self._loaders and saved != here:
            raise UsageError("saved-with-other-loaders", saved=saved, here=here)
        with believed(file):
            for loader, position in zip(self._loaders, positions, strict=True):
                loader.load_state_dict(position)


class _LoaderBatches(RankBatches):
    host = "Accelerate"

    def __init__(self, loader: WindowLoader[Any], accelerator: LockstepAccelerator) -> None:
        super().__init__(loader)
        self._accelerator = accelerator

    def __iter__(self) -> Iterator[Any]:
        for batch in super().__iter__():
            self._accelerator.walk(self)
            try:
                yield batch
            finally:
                self._accelerator.leave(self)

    def begin(self, window: Window) -> tuple[Sequence[float], float]:
        self._accelerator.begin(window.step)
        weigh = self._accelerator.weigh
        if weigh is None:
            return super().begin(window)
        weights = [float(weigh(batch)) for batch in window]
        return weights, total_weight(weights, self._accelerator.world)


def total_weight(weights: Sequence[float], world: World) -> float:
    """Return the sum of the weights over all ranks; 1 if it is 0."""
    total = torch.tensor(sum(weights), dtype=torch.float64)
    world.control.all_reduce(total, place="for the weight of a step").wait()
    return total.item() or 1.0


def gather_rows(gather: Callable[[Any], Any], data: Any) -> Any:
    """Gather tensors in nested containers, whose first dimension may differ between ranks.

    Args:
        gather: Accelerate's gather, for equal shapes.
        data: tensors in lists, tuples and dictionaries, nested alike on all ranks.
    """

    def gathered(tensor: Tensor) -> Tensor:
        rows = _rows(tensor)
        counts = gather(torch.tensor([len(rows)], device=rows.device)).tolist()
        if len(set(counts)) == 1:
            result: Tensor = gather(tensor)
            return result
        most = max(counts)
        missing = rows.new_zeros(most - len(rows), *rows.shape[1:])
        parts = gather(torch.cat([rows, missing])).split(most)
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    return recursively_apply(gathered, data, error_on_other_type=True)


def without_rows(data: Any) -> Any:
    """Return `data` with no rows in its tensors, or no objects if it is a list without tensors."""
    if isinstance(data, list) and not any(isinstance(leaf, Tensor) for leaf in tree_leaves(data)):
        return []
    return recursively_apply(lambda tensor: _rows(tensor)[:0], data)


def _rows(tensor: Tensor) -> Tensor:
    if tensor.dim():
        return tensor
    return tensor[None]


def share_memory(model: DistributedDataParallel, world: World) -> None:
    """Average gradients through shared memory, if all ranks are on one host."""
    if world.group.memory is not None:
        model.register_comm_hook(None, shared_memory_hook)


def check_ranks(host: str, seen: int, world: World) -> None:
    """Raise UsageError if the framework `host` counts `seen` ranks and the world has another
    number: each rank would then train alone.
    """
    if seen != world.size:
        raise UsageError("host-sees-other-ranks", host=host, seen=seen, size=world.size)


def refuse(name: str, value: object, instead: str) -> NoReturn:
    """Raise UsageError for a framework's option that has no meaning here. `instead`: what to do."""
    raise UsageError("keyword-without-meaning", name=name, value=value, instead=instead)
