"""torch's contract, and nothing more: wrap a module, call backward, and `.grad` is the mean over all ranks.

    model = lockstep.DistributedDataParallel(net)
    loss.backward()                  # gradients leave bucket by bucket while it runs; when it returns they are averaged
    optimizer.step()

It divides by the world size, as torch's does: right where every rank holds as many samples, a mean of means where not. The Stepper
divides by the true weight.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from lockstep.errors import UsageError
from lockstep.gradients.reducer import Reducer
from lockstep.gradients.reductions import reduction as choose_reduction
from lockstep.gradients.replicate import replicate
from lockstep.world import World


class DistributedDataParallel(nn.Module):
    """Averages the gradients of `module` over all ranks at the end of each backward.

    Parameters and buffers are made equal to rank 0's here. `bucket_cap_mb` bounds a bucket (MiB); `reduce` names how gradients are
    summed (auto, native, central). The wrapped module is `.module`; the hooks are on its parameters, so a forward through `.module`
    is reduced as well. Raises UsageError for a module without trainable parameters.
    """

    def __init__(self, module: nn.Module, *, bucket_cap_mb: float = 25, reduce: str = "auto", world: World | None = None) -> None:
        super().__init__()
        if not bucket_cap_mb > 0:
            raise UsageError(f"bucket_cap_mb={bucket_cap_mb}: a bucket holds more than 0 MiB")
        self.module = module
        self._world = world or World.current()
        replicate(module, self._world.group)
        named = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
        self._reducer: Reducer | None = Reducer(
            named, self._world.group, choose_reduction(reduce, self._world.group), bucket_bytes=int(bucket_cap_mb * 2**20)
        )
        self._reducer.closing = True
        self._reducer.scale = 1 / self._world.size
        self._reducer.end_of_backward = self._reducer.finish

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._reducer is not None and self.training and torch.is_grad_enabled():
            self._reducer.follow_arrivals()
        return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards in this block only add to `.grad`; the first backward after it sends the sum of all. Restores the old state, also after an exception."""
        if self._reducer is None:
            raise UsageError("no_sync() has no meaning inside a Stepper: its windows decide when gradients leave")
        with self._reducer.window(last=False):
            yield

    def give_up_reducer(self) -> Reducer:
        """Hand the reducer to a Stepper: backward no longer averages by itself."""
        if self._reducer is None:
            raise UsageError("this DistributedDataParallel already belongs to a Stepper")
        reducer, self._reducer = self._reducer, None
        reducer.end_of_backward = None
        reducer.closing = False
        reducer.scale = 1.0
        return reducer
