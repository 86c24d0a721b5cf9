"""Ray Train: `TorchTrainer(train_fn, torch_config=LockstepConfig(),
scaling_config=ScalingConfig(num_workers=(1, 8)))`.

    Ray Train    starts the workers, opens torch's process group, restarts all workers after a
                 failure or at another size
    train_fn     lockstep.init() adopts that process group; Stepper, Loader and Checkpoints work as
                 under `lockstep run`

The number of a worker's threads is the number of CPUs that Ray reserved for it (Ray sets
OMP_NUM_THREADS). A Stepper in exact mode sets one thread.
"""

from __future__ import annotations

import os
from types import TracebackType
from typing import Any

from lockstep.runtime import extras
from lockstep.runtime.environment import TIMEOUT
from lockstep.runtime.interfaces import gloo_and_nccl
from lockstep.world.world import World

try:
    import ray.util
    from ray.train.torch import TorchConfig
    from ray.train.torch.config import TorchConfigContextManager, _TorchBackend
except ImportError as error:
    raise extras.missing("lockstep.integrations.ray_train", f"Ray Train ({error})", "ray") from None


class LockstepConfig(TorchConfig):
    """Ray Train's TorchConfig, for train functions that use Lockstep.

    On every worker, before the process group is opened:

    - gloo and NCCL use the interface of the node's address, unless GLOO_SOCKET_IFNAME or
      NCCL_SOCKET_IFNAME is set;
    - `timeout_s` is also the limit of Lockstep's own collectives and barriers.

    Before the train function runs, GROUP_RANK tells Lockstep the number of the node. When the
    function ends, its World is closed. Ray handles signals, restarts and the choice of nodes: no
    signal handler is installed, and `StepResult.stop` stays false.

    Example::

        trainer = TorchTrainer(train, torch_config=LockstepConfig(), scaling_config=scaling)

    Args:
        backend, init_method, timeout_s: as for TorchConfig.
    """

    @property
    def backend_cls(self) -> type[_LockstepBackend]:
        return _LockstepBackend

    @property
    def train_func_context(self) -> type[_WorldClosed]:
        return _WorldClosed


class _WorldClosed(TorchConfigContextManager):
    """Closes the World that the train function leaves open. It runs around that function, in the
    same thread. Ray ends the process group afterwards.
    """

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        World.close_open(failed=kind is not None)
        return bool(super().__exit__(kind, error, trace))  # type: ignore[no-untyped-call]


class _LockstepBackend(_TorchBackend):
    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        worker_group.execute(_prepare, backend_config.timeout_s)
        super().on_start(worker_group, backend_config)

    def on_training_start(self, worker_group: Any, backend_config: Any) -> None:
        super().on_training_start(worker_group, backend_config)
        worker_group.execute(_number_node)


def _prepare(timeout_s: float) -> None:
    """Set the network interfaces and the timeout of collectives. Runs on a worker."""
    address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    os.environ.update(gloo_and_nccl(address, os.environ))
    os.environ[TIMEOUT] = str(timeout_s)


def _number_node() -> None:
    """Set torchrun's variable for the number of the node. Runs on a worker. Ray sets RANK,
    WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE as torchrun does, but uses another name for this.
    """
    os.environ["GROUP_RANK"] = os.environ["NODE_RANK"]
