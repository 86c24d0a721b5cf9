"""Shared memory for those who stay with torch's DistributedDataParallel: a communication hook."""

# No postponed annotations: torch reads them to see whether this is a hook.
import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.collectives.api import resolve
from lockstep.errors import UsageError
from lockstep.world.world import World


def shared_memory_hook(
    state: dist.ProcessGroup | None, bucket: dist.GradBucket
) -> torch.futures.Future[Tensor]:
    """Averages a bucket of torch's DistributedDataParallel through the memory of the host that all
    ranks are on.

        ddp = torch.nn.parallel.DistributedDataParallel(model)
        ddp.register_comm_hook(None, lockstep.shared_memory_hook)

    `state` is the wrapper's process group, None for all ranks. The world is opened with
    `lockstep.init()`, or by torch and adopted here. The bucket is done when this returns: on the
    cores that compute, nothing is gained by computing beside it. Raises UsageError where the ranks
    do not share the memory of one x86 Linux host, or train on GPUs.
    """
    world = World.current()
    group = world.group if state is None else resolve(state)
    gradients = bucket.buffer()
    if group.memory is not None:
        group.memory.all_reduce(
            gradients, "mean", place=f"for gradient bucket {bucket.index()}"
        ).wait()
    elif group.size > 1:
        raise UsageError("hook-needs-shared-memory")
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(gradients)
    return future
