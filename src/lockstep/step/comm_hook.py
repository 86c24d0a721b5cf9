"""A communication hook that gives torch's own DistributedDataParallel shared-memory reduction."""

# No `from __future__ import annotations`: torch reads the annotations to check the hook.
import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.collectives.api import resolve
from lockstep.errors import UsageError
from lockstep.world.world import World


def shared_memory_hook(
    state: dist.ProcessGroup | None, bucket: dist.GradBucket
) -> torch.futures.Future[Tensor]:
    """Average the buckets of torch's own DistributedDataParallel through the memory of one host.

    Open the world with `lockstep.init()`, or with torch; Lockstep then adopts torch's process
    group. The bucket is already averaged when the hook returns. Overlap would gain nothing,
    because the same cores also compute the backward.

    Example::

        ddp = torch.nn.parallel.DistributedDataParallel(model)
        ddp.register_comm_hook(None, lockstep.shared_memory_hook)

    Args:
        state: the wrapper's process group; None for all ranks.
        bucket: a bucket of gradients, from torch's wrapper.

    Returns:
        A completed future: the bucket's mean as a flat tensor of the bucket's dtype.

    Raises:
        UsageError: the ranks do not share the memory of one x86 Linux host, or train on GPUs.
    """
    world = World.current()
    group = world.group if state is None else resolve(state)
    gradients = bucket.buffer()
    if gradients.is_sparse:  # its rows differ between ranks
        dist.all_reduce(gradients.div_(group.size), group=group.process_group)
    elif group.memory is not None:
        group.memory.all_reduce(
            gradients, "mean", place=f"for gradient bucket {bucket.index()}"
        ).wait()
    elif group.size > 1:
        raise UsageError("shared-memory-impossible", what="shared_memory_hook")
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(gradients)
    return future
