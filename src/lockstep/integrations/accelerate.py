"""Accelerate on Lockstep: `lockstep run --workers 2 train.py`.

    from lockstep.integrations.accelerate import LockstepAccelerator

    accelerator = LockstepAccelerator()          # in place of accelerate.Accelerator
    loader = lockstep.Loader(dataset, global_batch=64, micro_batch=8)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

It is a subclass: `prepare` wraps models in `lockstep.DistributedDataParallel`, and a Loader in
what a loop walks batch by batch. All else is Accelerate's.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.checkpoints.manifest import believed
from lockstep.checks.divergence import ReplicaCheck
from lockstep.data.window_loader import WindowLoader
from lockstep.errors import UsageError
from lockstep.integrations.batches import Batches
from lockstep.runtime import extras, status
from lockstep.runtime.disk import write_whole
from lockstep.step.data_parallel import DistributedDataParallel
from lockstep.world.world import World, init

try:
    from accelerate import Accelerator
    from accelerate.utils import DistributedType, InitProcessGroupKwargs
except ImportError as error:
    raise UsageError(
        "missing-extra",
        what="lockstep.integrations.accelerate",
        package=f"Accelerate ({error})",
        install=extras.install("accelerate"),
    ) from None
extras.warn_untested("accelerate", "1.15", "1.15")
_PLACES = "lockstep.json"
_TYPES = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
_OTHERS = "shard a model by lockstep.Stepper and --mesh, or use Accelerate's own class"


class LockstepAccelerator(Accelerator):
    """accelerate.Accelerator with Lockstep's wrapper and Loader. It takes the same arguments, all
    by name; without an accelerator in the host `cpu` is True.

    A Loader given to `prepare` decides about gradient accumulation: gradients are summed over the
    ranks, and the optimizer steps, at the last batch of a global batch. `save_state` keeps the
    Loaders' places, and compares the replicas first; so does `end_training`.

    Raises:
        UsageError: Accelerate sees another number of ranks than the launcher started; DeepSpeed,
            FSDP and other ways to divide a model; a Loader that is a stream.
        ReplicaDivergence: on all ranks, naming the parameter and the ranks.
    """

    def __init__(self, **options: Any) -> None:
        options.setdefault("cpu", not torch.accelerator.is_available())
        handlers = options.get("kwargs_handlers") or []
        opening = [each for each in handlers if isinstance(each, InitProcessGroupKwargs)]
        given = opening[0].to_kwargs() if opening else {}
        self.world: World = init(device="cpu" if options["cpu"] else None, **given)
        self._wrapped: list[DistributedDataParallel] = []
        self._loaders: list[_Prepared] = []
        self._schedulers_of_ours: list[Any] = []
        self._walked: _Prepared | None = None
        self._weights, self._divisor = 0.0, float(self.world.size)
        super().__init__(**options)
        check_ranks("Accelerate", self.num_processes, self.world)
        for name, value, plain in (
            ("distributed_type", self.distributed_type, self.distributed_type in _TYPES),
            ("parallelism_config", self.parallelism_config, self.parallelism_config is None),
        ):
            if not plain:
                raise UsageError("keyword-without-meaning", name=name, value=value, instead=_OTHERS)
        self.register_save_state_pre_hook(self._on_save)
        self.register_load_state_pre_hook(self._on_load)

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """As Accelerate's; a `lockstep.Loader` becomes what gives this rank's batches."""
        ours = [self._prepared(each) if isinstance(each, WindowLoader) else each for each in args]
        return super().prepare(*ours, device_placement=device_placement)

    def _prepared(self, loader: WindowLoader[Any]) -> _Prepared:
        if (steps := self.gradient_accumulation_steps) != 1:
            instead = "give the Loader global_batch and micro_batch"
            name = "gradient_accumulation_steps"
            raise UsageError("keyword-without-meaning", name=name, value=steps, instead=instead)
        self._loaders.append(_Prepared(loader, self))
        self._count_steps()
        return self._loaders[-1]

    def prepare_model(
        self,
        model: nn.Module,
        device_placement: bool | None = None,
        evaluation_mode: bool = False,
    ) -> nn.Module:
        if isinstance(model, DistributedDataParallel):
            return model
        prepared = super().prepare_model(model, device_placement, evaluation_mode=True)
        if evaluation_mode or not any(each.requires_grad for each in prepared.parameters()):
            return prepared
        handler = self.ddp_handler
        options = {} if handler is None else handler.to_kwargs()
        wrapped = DistributedDataParallel(prepared, world=self.world, **options)
        if handler is not None:
            handler.register_comm_hook(wrapped)
        self._wrapped.append(wrapped)
        return wrapped

    def prepare_scheduler(self, scheduler: Any) -> Any:
        prepared = super().prepare_scheduler(scheduler)
        self._schedulers_of_ours.append(prepared)
        self._count_steps()
        return prepared

    def _count_steps(self) -> None:
        """Accelerate's scheduler steps once for each rank, for a global batch that grows with
        their number. A Loader's does not.
        """
        for each in self._schedulers_of_ours:
            each.split_batches = bool(self._loaders) or each.split_batches

    def unwrap_model(self, model: nn.Module, *args: Any, **options: Any) -> Any:
        return super().unwrap_model(_bare(model), *args, **options)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> Any:
        return super().get_state_dict(_bare(model), unwrap)

    @contextmanager
    def accumulate(self, *models: nn.Module) -> Iterator[None]:
        """As Accelerate's. Where a Loader is walked, it has decided already."""
        with nullcontext() if self._walked else super().accumulate(*models):
            yield

    def backward(
        self, loss: Tensor, *, weight: float | Tensor | None = None, **options: Any
    ) -> None:
        """As Accelerate's, and for batches of a Loader weighted: the gradient is that of the mean
        over all samples of the global batch.

        Args:
            loss: the mean over the batch.
            weight: what it is a mean over, where that is not samples: tokens. Then each batch has
                one backward, and ranks wait for each other before a step's last.
            options: for torch's backward.
        """
        batches, divisor = self._walked, float(self.world.size)
        if batches is None:
            factor = 1.0
        elif weight is None:
            factor = batches.samples * divisor / batches.total
        else:
            factor = float(weight) if batches.samples else 0.0
            self._weights += factor
            if batches.closes:
                total = torch.tensor(self._weights, dtype=torch.float64)
                self.world.control.all_reduce(total, place="for the weight of a step").wait()
                divisor, self._weights = total.item() or 1.0, 0.0
        if divisor != self._divisor:
            self._divisor = divisor
            for model in self._wrapped:
                model.divisor = divisor
        super().backward(loss * factor, **options)

    def walk(self, batches: _Prepared | None) -> None:
        """`batches` has fetched its next batch; None: nothing is walked."""
        self._walked = batches
        self.sync_gradients = batches is None or batches.closes
        for model in self._wrapped:
            model.require_backward_grad_sync = self.sync_gradients
        if batches is not None:
            status.step(batches.step + 1)

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        if isinstance(dataloader, Batches):
            instead = "load_state has put the Loader where it was"
            name = "skip_first_batches"
            raise UsageError(
                "keyword-without-meaning", name=name, value=num_batches, instead=instead
            )
        return super().skip_first_batches(dataloader, num_batches)

    def end_training(self) -> None:
        self.check_replicas("at the end of the training")
        super().end_training()

    def check_replicas(self, when: str) -> None:
        """Compare the weights of all ranks now, every bit. Every rank calls it.

        Args:
            when: what the error begins with.
        """
        for model in self._wrapped:
            named = list(model.module.named_parameters())
            ReplicaCheck().compare([(self.world.group, named)], 0, when)

    def _on_save(self, models: Any, weights: Any, folder: str) -> None:
        if not all(each.closes for each in self._loaders):
            raise UsageError("saved-inside-a-step")
        self.check_replicas("before a checkpoint")
        if self.is_main_process:
            places = [each.state_dict() for each in self._loaders]
            write_whole(Path(folder, _PLACES), json.dumps(places))

    def _on_load(self, models: Any, folder: str) -> None:
        file = Path(folder, _PLACES)
        with believed(file):
            places = json.loads(file.read_text()) if self._loaders else []
            for loader, place in zip(self._loaders, places, strict=True):
                loader.load_state_dict(place)


class _Prepared(Batches):
    host = "Accelerate"

    def __init__(self, loader: WindowLoader[Any], accelerator: LockstepAccelerator) -> None:
        super().__init__(loader)
        self._accelerator = accelerator

    def __iter__(self) -> Iterator[Any]:
        try:
            for batch in super().__iter__():
                self._accelerator.walk(self)
                yield batch
        finally:
            self._accelerator.walk(None)


def _bare(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, DistributedDataParallel) else model


def check_ranks(host: str, seen: int, world: World) -> None:
    """Refuse to have each rank train alone. `seen`: the ranks that the host counts."""
    if seen != world.size:
        raise UsageError("host-sees-other-ranks", host=host, seen=seen, size=world.size)
