"""Lightning's Trainer and Fabric on Lockstep: `lockstep run --workers 2 train.py`.

    import lockstep.integrations.lightning             # registers the name "lockstep"
    Trainer(strategy="lockstep", accelerator="cpu")    # or strategy=LockstepStrategy(...)
    Fabric(strategy="lockstep", accelerator="cpu")     # or strategy=LockstepFabricStrategy(...)

Both wrap the model in `lockstep.DistributedDataParallel`. The Trainer's strategy also weights
batches in the mean, works with a `lockstep.Loader`, compares the replicas before each save and at
the end, and reports each rank's step to the launcher.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lockstep.checks.divergence import ReplicaCheck
from lockstep.data.loader import Loader
from lockstep.data.window_loader import WindowLoader
from lockstep.errors import UsageError
from lockstep.integrations.batches import RankBatches
from lockstep.runtime import extras, status
from lockstep.runtime.environment import Placement, placement
from lockstep.step.data_parallel import DistributedDataParallel
from lockstep.world.world import init

try:
    from lightning.fabric.plugins import ClusterEnvironment
    from lightning.fabric.strategies import STRATEGY_REGISTRY
    from lightning.fabric.strategies.ddp import DDPStrategy as FabricDDP
    from lightning.fabric.strategies.strategy import _BackwardSyncControl
    from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry

    from lockstep.integrations.lightning_checkpoints import (
        LockstepCheckpointIO as LockstepCheckpointIO,
    )
except ImportError as error:
    raise extras.missing(
        "lockstep.integrations.lightning", f"Lightning ({error})", "lightning"
    ) from None
extras.warn_untested("lightning", "2.5", "2.6")
# arguments of Lightning's own class; all others are for DistributedDataParallel
_HOSTS = {"accelerator", "parallel_devices", "checkpoint_io", "precision_plugin", "precision"}
_LAUNCH = "start the ranks with `lockstep run --workers N script.py`"
_REDUCE = "choose how gradients are summed by reduce=..."
_WITHOUT_MEANING = {
    "cluster_environment": _LAUNCH,
    "start_method": _LAUNCH,
    "process_group_backend": "Lockstep chooses gloo for CPUs and NCCL for GPUs",
    **dict.fromkeys(("ddp_comm_state", "ddp_comm_hook", "ddp_comm_wrapper"), _REDUCE),
    "model_averaging_period": "use lockstep.Stepper(sync_every=...)",
}


class LockstepEnvironment(ClusterEnvironment):
    """The ranks that `lockstep run`, torchrun, srun or mpirun started; one rank without any of
    them. Lightning starts no processes.

    Raises:
        UsageError: `devices` times `num_nodes` of the Trainer is not the number of ranks.
    """

    def __init__(self) -> None:
        self.place = placement(os.environ) or Placement(
            rank=0, size=1, local_rank=0, local_size=1, node=0, source="plain"
        )

    creates_processes_externally = True
    main_address = property(lambda self: os.environ.get("MASTER_ADDR", "127.0.0.1"))
    main_port = property(lambda self: int(os.environ.get("MASTER_PORT", "0")))

    @staticmethod
    def detect() -> bool:
        return placement(os.environ) is not None

    def world_size(self) -> int:
        return self.place.size

    def global_rank(self) -> int:
        return self.place.rank

    def local_rank(self) -> int:
        return self.place.local_rank

    def node_rank(self) -> int:
        return self.place.node

    def set_world_size(self, size: int) -> None:
        """Do nothing: Lightning calls it, but the launcher has set the world size already.

        Args:
            size: the number of ranks.
        """

    def set_global_rank(self, rank: int) -> None:
        """Do nothing: Lightning calls it, but the launcher has set the rank already.

        Args:
            rank: this process's number.
        """

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        if num_devices * num_nodes != self.place.size:
            raise UsageError(
                "lightning-devices", devices=num_devices, nodes=num_nodes, size=self.place.size
            )


class _OnLockstep(DDPStrategy if TYPE_CHECKING else object):  # type: ignore[misc]
    """The common base class of the strategies of Trainer and Fabric."""

    def __init__(self, *, timeout: timedelta | None = None, **options: Any) -> None:
        for name, instead in _WITHOUT_MEANING.items():
            value = options.pop(name, None)
            if value is not None:
                raise UsageError("keyword-without-meaning", name=name, value=value, instead=instead)
        self._timeout_of_ranks = timeout
        self._ranks = LockstepEnvironment()
        host = {name: options.pop(name) for name in _HOSTS & options.keys()}
        super().__init__(cluster_environment=self._ranks, **host)
        self._wrapper_options = options

    @property
    def parallel_devices(self) -> list[torch.device] | None:
        """The devices of this host's ranks. For CPUs Lightning's devices="auto" is one device, so
        it is repeated for each of the ranks that the launcher started.
        """
        return self._devices

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device] | None) -> None:
        if devices is not None and [device.type for device in devices] == ["cpu"]:
            devices = devices * self._ranks.place.local_size
        self._devices = devices

    def setup_environment(self) -> None:
        self.world = init(device=self.root_device, timeout=self._timeout_of_ranks)
        super().setup_environment()  # does not change an open process group

    def _wrapped(self, module: nn.Module) -> DistributedDataParallel:
        index = self.root_device.index
        return DistributedDataParallel(
            module,
            device_ids=None if index is None else [index],
            world=self.world,
            **self._wrapper_options,
        )


class LockstepStrategy(_OnLockstep, DDPStrategy):
    """Lightning's DDPStrategy with Lockstep's wrapper, for `Trainer(strategy=...)`.

    If `training_step` returns {"loss": mean, "weight": count}, the training uses the mean over all
    counted items, of all ranks and all accumulated batches. With a `lockstep.Loader` the weight
    defaults to the number of samples. Without either, the training uses the mean of the ranks'
    means. Replicas are compared before each save, and at the end.

    Example::

        trainer = Trainer(strategy=LockstepStrategy(), accelerator="cpu", devices=2)

    Args:
        timeout: the longest that one collective may take.
        options: accelerator, parallel_devices, checkpoint_io and precision_plugin, as for
            Lightning's class; all others are keywords of `lockstep.DistributedDataParallel`.

    Raises:
        UsageError: an argument of Lightning's DDPStrategy that has no meaning here.
        ReplicaDivergence: on all ranks, naming the parameter and the ranks.
    """

    _weight: float | None = None  # weight of the current batch
    _weights = 0.0  # total weight of this rank's batches since the last step

    def configure_ddp(self) -> None:
        assert self.lightning_module is not None
        self.model = self._wrapped(self.lightning_module)

    def process_dataloader(self, dataloader: object) -> object:
        if isinstance(dataloader, Batches) and self._trainer.training:
            dataloader.weighted = True
            dataloader.repeated = self._trainer.overfit_batches > 0
        return dataloader

    def on_train_start(self) -> None:
        loaders = self._trainer.train_dataloader
        if isinstance(loaders, Batches):
            return
        if any(isinstance(loader, Batches) for loader in tree_leaves(loaders)):
            reason = "it is one of several train loaders"
            raise UsageError("trainer-loader", host=Batches.host, reason=reason)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        status.step(self._trainer.global_step + 1)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        loader = self._trainer.train_dataloader
        self._weight = loader.weight if isinstance(loader, Batches) else None
        output = super().training_step(*args, **kwargs)
        if isinstance(output, Mapping) and "weight" in output and self._weight != 0:
            self._weight = float(output["weight"])
        return output

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        model = self.model
        weight = self._weight
        if weight is None or not isinstance(model, DistributedDataParallel):
            return super().backward(closure_loss, optimizer, *args, **kwargs)
        factor = weight
        if self._trainer.lightning_module.automatic_optimization:
            # undo Lightning's division of the loss by the number of accumulated batches
            factor *= self._trainer.accumulate_grad_batches
        self._weights += weight
        if model.require_backward_grad_sync:
            total = torch.tensor(self._weights, dtype=torch.float64)
            self.world.control.all_reduce(total, place="for the weight of a step").wait()
            model.divisor = total.item() or 1.0
            self._weights = 0.0
        return super().backward(closure_loss * factor, optimizer, *args, **kwargs)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce as Lightning does, but convert whole numbers to float for a mean. In Lightning the
        mean of whole numbers loses its fraction, and logged values are divided by such means.
        """
        mean = reduce_op in ("mean", "avg")
        if mean and isinstance(tensor, Tensor) and not tensor.is_floating_point():
            tensor = tensor.float()
        return super().reduce(tensor, group, reduce_op)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        self.check_replicas("before a checkpoint")
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def on_train_end(self) -> None:
        self.check_replicas("at the end of the training")

    def check_replicas(self, when: str) -> None:
        """Compare the weights of all ranks now, bit for bit. Every rank must call it.

        Args:
            when: the first words of the error message.
        """
        checks = self._wrapper_options.get("checks", "full")
        if isinstance(self.model, DistributedDataParallel) and checks == "full":
            named = list(self.model.module.named_parameters())
            ReplicaCheck().compare([(self.world.group, named)], self._trainer.global_step, when)

    def teardown(self) -> None:
        if isinstance(self.model, DistributedDataParallel):
            self.model = self.lightning_module
        super().teardown()

    @property
    def _trainer(self) -> Any:
        assert self.lightning_module is not None
        return self.lightning_module.trainer


class Batches(RankBatches):
    """Gives Lightning's Trainer the batches of a `lockstep.Loader`: this rank's batch of each step.

    Lightning saves the position in the data with each checkpoint, and a resume may have another
    number of ranks. In training, a rank without a sample in a short last step gets another rank's
    batch, with weight 0.

    Example::

        def train_dataloader(self):
            return Batches(lockstep.Loader(dataset, global_batch=64))

    Args:
        loader: a Loader of a map-style data set, with at most one micro-batch for each rank in a
            step.

    Raises:
        UsageError: a stream, or more micro-batches in a step than ranks. At the first batch: some
            ranks have no samples in the last step, and LockstepStrategy does not train with this
            loader.
    """

    host = "Lightning's Trainer"
    weighted = False
    """Whether a strategy uses `weight`."""
    repeated = False
    """Whether every epoch has the order of the first one."""
    batch_sampler = None  # Lightning reads it in a validation

    def __init__(self, loader: WindowLoader[Any]) -> None:
        super().__init__(loader)
        if not isinstance(loader, Loader):
            self.refuse("its data set is a stream")
        plan = self.loader.plan
        size = self.loader.size
        if plan.slots > size:
            self.refuse(f"a step has {plan.slots} micro-batches for {size} ranks")
        self.sampler = self  # Lightning calls its set_epoch

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(0 if self.repeated else epoch)

    def __iter__(self) -> Iterator[Any]:
        size = self.loader.size
        last_step = self.loader.plan.cut(len(self) - 1)
        if not self.weighted and not last_step.filled(size - 1, size):
            self.refuse("its last step leaves ranks without samples")
        yield from super().__iter__()


class LockstepFabricStrategy(_OnLockstep, FabricDDP):
    """Fabric's DDPStrategy with Lockstep's wrapper, for `Fabric(strategy=...)` and your own loop.

    Args:
        options: as for `LockstepStrategy`, with `precision` in place of `precision_plugin`.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._backward_sync_control = _NoSync()  # Fabric has no public way to set it

    def setup_module(self, module: nn.Module) -> Any:
        return self._wrapped(module)

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        state: dict[str, Any] = super().get_module_state_dict(_bare(module))
        return state

    def load_module_state_dict(
        self, module: nn.Module, state_dict: dict[str, Any], strict: bool = True
    ) -> None:
        super().load_module_state_dict(_bare(module), state_dict, strict)


class _NoSync(_BackwardSyncControl):
    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        assert isinstance(module, DistributedDataParallel)
        if enabled:
            return module.no_sync()
        return nullcontext()


def _bare(module: nn.Module) -> nn.Module:
    if isinstance(module, DistributedDataParallel):
        return module.module
    return module


StrategyRegistry.register("lockstep", LockstepStrategy)
STRATEGY_REGISTRY.register("lockstep", LockstepFabricStrategy)
